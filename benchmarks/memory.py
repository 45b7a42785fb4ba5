"""Temporary memory of an optimizer step on each rank: what the Linux kernel counts, and the plan.

Each row comes from a new group of gloo ranks. Two things happen before anything is counted. A step
with as many layers as ranks loads all code that is loaded at first use; with fewer layers some
ranks would own no matrix of some shape. And torch's flight recorder is filled: it keeps the last
2000 collectives of a process, at 1 to 2 KB each. Then parameters and gradients are made, free heap
is returned, and an optimizer is built and makes two steps. The second step gives:

- *measured*: the largest resident set (``VmHWM``, reset through ``/proc/self/clear_refs``), minus
  the resident set before the optimizer was built, minus its state. It contains slots, stack, the
  scratch of the products, the plan, and what torch and gloo allocate;
- *in a step*: the largest resident set minus the resident set before the step;
- *free heap*: the part of *measured* that ``malloc_trim`` returns after the step. malloc keeps such
  pages, which held temporaries of torch and oneDNN, for later allocations;
- *slots*: ``Pipeline.temporary_bytes``; *plan*: ``Plan.temporary_bytes``;
- *products*: the working memory of Newton-Schulz and of directions, which is kept between steps.

All in MB (10^6 bytes), of the rank that needs most. The kernel's counts are exact to about 0.3 MB.

    python benchmarks/memory.py [--layers 4,8,16,64] [--ranks 2,4] [--wave-mib 4]
        [--preset torch] [--json]
"""

import argparse
import ctypes
import gc
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import layers, mebibytes, on_ranks, sharded, show, slowest
from torch.distributed.device_mesh import init_device_mesh

from omn_dist import DualOptimizer

# What torch's flight recorder keeps, unless TORCH_FR_BUFFER_SIZE is set.
_RECORDED_COLLECTIVES = 2000


def measure(num_layers: int, preset: str, wave_bytes: int | None) -> dict[str, Any]:
    """One row of the table. Collective."""
    DualOptimizer(_groups(dist.get_world_size()), preset=preset, wave_bytes=wave_bytes).step()
    for _ in range(_RECORDED_COLLECTIVES):
        dist.all_reduce(torch.zeros(()))
    groups = _groups(num_layers)
    start = _without_free_heap()
    optimizer = DualOptimizer(groups, preset=preset, wave_bytes=wave_bytes)
    optimizer.step()
    before = _kernel_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    optimizer.step()
    peak, after = _kernel_bytes("VmHWM"), _kernel_bytes("VmRSS")
    free = after - _without_free_heap()
    state = sum(tensor.to_local().nbytes for values in optimizer.state.values() for tensor in values.values())
    assert optimizer._domains is not None
    (domain,) = optimizer._domains
    found = {
        "measured_mb": peak - start - state,
        "in_a_step_mb": peak - before,
        "free_heap_mb": free,
        "slots_mb": domain.pipeline.temporary_bytes,
        "plan_mb": domain.plan.temporary_bytes,
        "products_mb": optimizer._tools.scratch.num_bytes,
    }
    return {
        "name": f"{num_layers} layers, {dist.get_world_size()} ranks",
        "waves": len(domain.plan.waves),
        **{name: slowest(num_bytes) / 1e6 for name, num_bytes in found.items()},
    }


def _groups(num_layers: int) -> list[dict[str, Any]]:
    """A group of sharded parameters with gradients."""
    matrices, mesh = layers(num_layers), init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = [sharded(shape, mesh) for shape in matrices.values()]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    return [{"params": parameters, "param_names": list(matrices), "algorithm": "muon"}]


def _without_free_heap() -> int:
    """Return free heap to the system; the bytes of the resident set after that."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _kernel_bytes("VmRSS")


def _kernel_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=_numbers, default=[4, 8, 16, 64])
    parser.add_argument("--ranks", type=_numbers, default=[2, 4])
    parser.add_argument("--preset", choices=("omn", "torch"), default="torch")
    parser.add_argument("--wave-mib", type=mebibytes, help="byte budget of a wave (default: the optimizer's)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    options = (arguments.preset, arguments.wave_mib)
    rows = [on_ranks(ranks, measure, count, *options) for ranks in arguments.ranks for count in arguments.layers]
    show(rows, arguments.json)


if __name__ == "__main__":
    main()
