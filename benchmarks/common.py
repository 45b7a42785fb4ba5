"""Shared by all benchmarks: gloo ranks with one thread each, the machine, medians and quartiles."""

import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from omn_dist.roles.summary import align_columns


def layers(count: int) -> dict[str, tuple[int, int]]:
    """The matrices of ``count`` layers of hidden 512, by name."""
    shapes = {
        "q": (512, 512),
        "k": (512, 512),
        "v": (512, 512),
        "o": (512, 512),
        "gate": (1368, 512),
        "up": (1368, 512),
        "down": (512, 1368),
    }
    return {f"layers.{layer}.{name}": shape for layer in range(count) for name, shape in shapes.items()}


MATRICES = layers(8)
"""25.2 million elements, 334 GFLOP for five steps of the standard form."""


def environment() -> dict[str, Any]:
    """The machine and the versions, for all tables and JSON files."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": os.getloadavg()[0],
    }


def on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function(*arguments)`` on every rank of a new gloo group, with one thread each.

    Returns what the function returns on rank 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OMP_NUM_THREADS"] = "1"
        mp.spawn(_rank, args=(num_ranks, folder, function, arguments), nprocs=num_ranks)
        return torch.load(Path(folder) / "result", weights_only=False)


def _rank(rank: int, num_ranks: int, folder: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    result = function(*arguments)
    if rank == 0:
        torch.save(result, Path(folder) / "result")
    dist.barrier()
    dist.destroy_process_group()


def mebibytes(text: str) -> int:
    """Bytes, from MiB on the command line."""
    return int(float(text) * 2**20)


def sharded(shape: tuple[int, int], mesh: DeviceMesh) -> nn.Parameter:
    """A parameter of random numbers with its rows sharded over ``mesh``; not collective."""
    full = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).mul_(0.02)
    return nn.Parameter(distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None))


def slowest(seconds: float) -> float:
    """The largest value over all ranks. Collective."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    ordered = sorted(values)
    low, high = (ordered[int(fraction * (len(ordered) - 1))] for fraction in (0.25, 0.75))
    return low, statistics.median(ordered), high


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles in milliseconds."""
    low, median, high = quartiles(seconds)
    return {"median_ms": 1e3 * median, "low_ms": 1e3 * low, "high_ms": 1e3 * high}


def show(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Print the environment and a table of the rows, or both as JSON."""
    if as_json:
        print(json.dumps({"environment": environment(), "rows": list(rows)}, indent=1))
        return
    print("  ".join(f"{name}: {value}" for name, value in environment().items()))
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns] + [[_cell(row.get(column, "")) for column in columns] for row in rows]
    print(align_columns(cells, right=range(1, len(columns))))


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
