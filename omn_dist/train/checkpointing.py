"""Checkpoint folders: written whole or not at all, and verified before they are read.

A checkpoint is a folder such as ``step_00000010``. It holds the tensors (in the format of
torch.distributed.checkpoint, by parameter name), ``run.json`` (clock, configuration, groups) and
``manifest.json`` (the size of every file). While it is written its name ends in ``.partial``; it
is renamed when everything is on disk. So a folder without that ending is complete, even when the
writer was killed.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from omn_dist.optim.checkpoint import (
    check_groups,
    check_tensors,
    describe_groups,
    model_state_by_name,
    optimizer_state_by_name,
)
from omn_dist.settings import SettingsError, from_mapping
from omn_dist.train.files import sync_folder, write_durably
from omn_dist.train.schedule import TokenClock

_FORMAT = 1
_NAME = re.compile(r"step_(\d{8,})")
_PARTIAL = ".partial"
_REMEDY = "remove this checkpoint, or choose another one with checkpoint.resume"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What a checkpoint holds besides the tensors."""

    path: Path
    """The checkpoint folder."""
    clock: TokenClock
    """Counts when it was saved; the position in the data follows from them."""
    config: Mapping[str, Any]
    """The configuration of the run that saved it."""
    groups: Mapping[str, Mapping[str, Any]]
    """Algorithm, weight decay and shape by parameter name."""
    world_size: int
    """Number of ranks of the run that saved it."""
    data_fingerprint: str
    """Fingerprint of the training text."""


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in ``folder``, oldest first. Unfinished ones are left out."""
    names = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in names if _NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint, from the name of its folder."""
    return int(path.name.rpartition("_")[2])


def read_saved_run(path: Path) -> SavedRun:
    """Check the files of a checkpoint against its manifest and read everything but the tensors.

    Raises:
        SettingsError: a file is missing, has another size, or cannot be read.
    """
    if not path.is_dir():
        raise SettingsError(f"checkpoint {path}: no such folder; choose another one with checkpoint.resume")
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        sizes = {str(name): int(size) for name, size in manifest["size_by_file"].items()}
        if manifest["format"] != _FORMAT:
            raise SettingsError(f"checkpoint {path}: found format {manifest['format']!r}, expected {_FORMAT}; {_REMEDY}")
        for name, size in sizes.items():
            if not (path / name).is_file():
                raise SettingsError(f"checkpoint {path}: file {name} is missing; {_REMEDY}")
            if (path / name).stat().st_size != size:
                raise SettingsError(
                    f"checkpoint {path}: file {name} has {(path / name).stat().st_size} bytes, expected {size}; {_REMEDY}"
                )
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
        _read_metadata(path)
        return SavedRun(
            path=path,
            clock=from_mapping(TokenClock, run["clock"], path="clock"),
            config=run["config"],
            groups=run["groups"],
            world_size=run["world_size"],
            data_fingerprint=run["data_fingerprint"],
        )
    except SettingsError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(_unreadable(path, error)) from error


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    clock: TokenClock,
    config: Mapping[str, Any],
    data_fingerprint: str,
    keep: int,
) -> Path:
    """Write the checkpoint of step ``clock.steps`` into ``folder``; keep the newest ``keep``.

    Collective: all ranks must call. When it returns on any rank, the whole checkpoint is on disk.
    """
    final = folder / f"step_{clock.steps:08d}"
    partial = folder / (final.name + _PARTIAL)
    first = dist.get_rank() == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"*{_PARTIAL}"):
            shutil.rmtree(leftover)
        partial.mkdir()
    dist.barrier()
    tensors = _training_tensors(model, optimizer) | _generator_states()
    save(tensors, storage_writer=FileSystemWriter(partial, sync_files=True))
    if first:
        run = {
            "clock": dataclasses.asdict(clock),
            "config": config,
            "groups": describe_groups(optimizer),
            "world_size": dist.get_world_size(),
            "data_fingerprint": data_fingerprint,
        }
        write_durably(partial / "run.json", json.dumps(run, indent=1))
        size_by_file = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        write_durably(partial / "manifest.json", json.dumps({"format": _FORMAT, "size_by_file": size_by_file}, indent=1))
        partial.rename(final)
        sync_folder(folder)
        for old in complete_checkpoints(folder)[:-keep]:
            # Renamed first: a removal that is interrupted must not leave a damaged folder
            # under the name of a complete one.
            doomed = old.rename(old.with_name(old.name + _PARTIAL))
            shutil.rmtree(doomed)
    dist.barrier()
    return final


def load_checkpoint(saved: SavedRun, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load model, optimizer and random generators from a checkpoint, in place.

    The number of ranks may differ from that of the run that saved it. Ranks that the saved run did
    not have keep the state of their random generators. Collective: all ranks must call.

    Raises:
        SettingsError: the groups, a shape or a dtype differ, or a file is damaged. All ranks raise
            the same error.
    """
    check_groups(saved.groups, optimizer)
    metadata = _read_metadata(saved.path)
    tensors = _training_tensors(model, optimizer)
    check_tensors(metadata, tensors)
    generators = _known_generators(metadata, _generator_states())
    try:
        load(tensors | generators, storage_reader=FileSystemReader(saved.path))
    except CheckpointException as error:
        # A BaseException. Torch raises it on all ranks when one of them fails.
        cause = next(iter(error.failures.values()))[0]
        raise SettingsError(_unreadable(saved.path, cause)) from error
    for name, state in generators.items():
        if name.endswith(".cuda"):
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)


def _training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in model_state_by_name(model).items()}
    return tensors | {
        f"optimizer.{name}.{key}": tensor
        for name, state in optimizer_state_by_name(optimizer).items()
        for key, tensor in state.items()
    }


def _generator_states() -> dict[str, Tensor]:
    """States of this rank's random generators; the names contain the rank."""
    prefix = f"generator.rank_{dist.get_rank()}"
    states = {f"{prefix}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{prefix}.cuda"] = torch.cuda.get_rng_state()
    return states


def _known_generators(metadata: Metadata, states: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: state for name, state in states.items() if name in metadata.state_dict_metadata}


def _read_metadata(path: Path) -> Metadata:
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # a damaged pickle can raise anything
        raise SettingsError(_unreadable(path, error)) from error


def _unreadable(path: Path, cause: BaseException) -> str:
    first_line = (str(cause).splitlines() or ["no message"])[0]
    return f"checkpoint {path}: cannot be read ({type(cause).__name__}: {first_line[:200]}); {_REMEDY}"
