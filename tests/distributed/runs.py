"""Reads the files of training runs, to compare one run with another."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from omn_dist.train.metrics import read_rows

MEASURED = ("seconds", "seconds_forward_backward", "seconds_optimizer", "tokens_per_second")


def tensors(run_folder: Path, step: int) -> dict[str, Tensor]:
    """Weights and optimizer state of a checkpoint, whole."""
    path = run_folder / "checkpoints" / f"step_{step:08d}"
    reader = FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    result = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("generator.")
    }
    load(dict(result), storage_reader=reader, no_dist=True)
    return result


def assert_bitwise(run_folder: Path, expected_folder: Path, step: int) -> None:
    """Both runs have the same checkpoint of ``step``."""
    found, expected = tensors(run_folder, step), tensors(expected_folder, step)
    assert found.keys() == expected.keys()
    kinds = {name.rpartition(".")[2] for name in found}
    assert {"weight", "momentum_buffer", "exp_avg", "exp_avg_sq", "step"} <= kinds
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def comparable(run_folder: Path) -> list[dict[str, Any]]:
    """The rows of a run without times; everything else must be the same in every run."""
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in read_rows(run_folder / "metrics.jsonl")]
