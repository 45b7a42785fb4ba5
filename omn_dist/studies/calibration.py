"""A short measurement of the machine at hand, for predictions of its own steps instead of a data sheet's."""

import dataclasses
import json
import math
import os
import platform
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from omn_dist.algorithms import kernels
from omn_dist.algorithms.newton_schulz import RECIPES, Recipe, orthogonalize_into
from omn_dist.algorithms.scratch import Scratch
from omn_dist.plan.cost import newton_schulz_flops, newton_schulz_seconds
from omn_dist.plan.devices import Device, Topology

_STEPS = 5
# (rows, columns) of matrices to orthogonalise: short sides from where launches count to where products do.
_CPU_SHAPES = ((96, 192), (192, 384), (256, 688), (384, 768))
_GPU_SHAPES = ((256, 512), (512, 1024), (1024, 2048), (2048, 5504))
_ELEMENTS = 1 << 22
_MESSAGE_BYTES = (1 << 12, 1 << 22)


def calibrate(device: torch.device, *, repeats: int = 5, itemsizes: Sequence[int] = (4,), num_elements: int = _ELEMENTS) -> Device:
    """Measure small operations, memory, Newton-Schulz and, where a process group runs, an all-to-all. Takes seconds.

    All ranks measure at the same time, as they work in a step: ranks that share cores see the rates that are left for them.
    The slowest rank counts.

    Args:
        device: where tensors live.
        repeats: measurements of each number.
        num_elements: of one rank's shard of all parameters: memory that fits in a cache is faster.
        itemsizes: 4 to measure fp32 products, 2 for bf16; the other rate is set to the same number.

    Collective over the default process group, if there is one.
    """
    seconds = _Stopwatch(device, repeats)
    small = torch.ones(16, device=device)
    launch = seconds.of(lambda: [small.add_(0.0) for _ in range(1000)]) / 1000
    view = seconds.of(lambda: [small[:8] for _ in range(1000)]) / 1000
    first, second = torch.ones((2, num_elements), device=device).unbind()
    passes = max(1, _ELEMENTS // num_elements)
    seconds_a_pass = seconds.of(lambda: [torch.add(first, second, out=first) for _ in range(passes)]) / passes
    memory = 3 * 4 * num_elements / seconds_a_pass
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    blank = Device(
        name="calibrated",
        float32_flops_per_second=math.inf,
        bfloat16_flops_per_second=math.inf,
        half_rate_side=0.0,
        memory_bytes_per_second=memory,
        launch_seconds=launch,
        # The host of a GPU makes its views while the GPU works.
        view_seconds=view if device.type == "cpu" else 0.0,
        overlaps=device.type != "cpu",
        ranks_per_core=max(1.0, world_size * torch.get_num_threads() / num_cores()) if device.type == "cpu" else 1.0,
        fused_adamw=device.type != "cpu" or kernels.takes_adamw(first, second),
        topology=_topology(device, seconds, world_size),
        source=f"measured on {world_size} ranks with torch {torch.__version__}, device {device.type}",
    )
    fits = {itemsize: _products(device, seconds, blank, itemsize) for itemsize in itemsizes}
    float32, half_side = fits.get(4, next(iter(fits.values())))
    bfloat16, _ = fits.get(2, (float32, half_side))
    return dataclasses.replace(
        blank, float32_flops_per_second=float32, bfloat16_flops_per_second=bfloat16, half_rate_side=half_side
    )


def save_calibration(device: Device, path: Path) -> None:
    """Write what ``omn-dist plan --device FILE.json`` reads."""
    path.write_text(json.dumps(dataclasses.asdict(device), indent=1) + "\n")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slowest_machine(spans: Iterable[Sequence[float]]) -> float:
    """Of (machine, start, end) of every rank: the longest time from a machine's first start to its last end."""
    by_machine: dict[float, tuple[float, float]] = {}
    for machine, start, end in spans:
        first, last = by_machine.get(machine, (start, end))
        by_machine[machine] = (min(first, start), max(last, end))
    return max(last - first for first, last in by_machine.values())


class _Stopwatch:
    """Medians over repeats of the slowest rank's seconds.

    CPU ranks of one machine share its cores and its clock: there the time from the first rank's start to the last one's end
    counts. A rank that gets a core only when others are done would otherwise find that it had it for itself.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device = device
        self._repeats = repeats

    def of(self, work: Callable[[], object]) -> float:
        """Seconds of ``work``, after one run that does not count."""
        work()
        found = []
        for _ in range(self._repeats):
            self._ready()
            start = time.perf_counter()
            work()
            self._synchronize()
            found.append(self._slowest(start, time.perf_counter()))
        return statistics.median(found)

    def _slowest(self, start: float, end: float) -> float:
        """Of all ranks. Collective."""
        if not dist.is_initialized():
            return end - start
        machine = zlib.crc32(platform.node().encode()) if self._device.type == "cpu" else dist.get_rank()
        mine = torch.tensor([machine, start, end], dtype=torch.float64, device=self._device)
        everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, mine)
        return slowest_machine([rank.tolist() for rank in everybody])

    def _ready(self) -> None:
        self._synchronize()
        if dist.is_initialized():
            dist.barrier()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _products(device: torch.device, seconds: _Stopwatch, blank: Device, itemsize: int) -> tuple[float, float]:
    """Rate of large products and the short side of half that rate.

    ``1 / rate(s) = 1 / R + h / (R s)``: a line in 1 / s, fitted to what launches and memory leave of the time.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    inverse_side, inverse_rate = [], []
    shapes = _CPU_SHAPES if device.type == "cpu" else _GPU_SHAPES
    for shape in shapes:
        # As many as make a measurement of milliseconds, one after the other and in place as in a step.
        count = max(1, shapes[-1][0] * shapes[-1][1] // (shape[0] * shape[1]))
        recipe = RECIPES["omn" if itemsize == 4 else "torch"]
        stack = torch.randn((count, *shape), generator=generator).to(device, recipe.input_dtype)
        measured = seconds.of(partial(_one_by_one, stack, recipe, Scratch())) / count
        rest = measured - newton_schulz_seconds(*shape, _STEPS, blank, itemsize)
        inverse_side.append(1 / min(shape))
        inverse_rate.append(max(rest, 0.1 * measured) / newton_schulz_flops(*shape, _STEPS))
    # Relative errors count, so that the small matrices do not decide alone.
    weights = 1 / np.array(inverse_rate)
    slope, offset = np.polyfit(inverse_side, inverse_rate, 1, w=weights)
    offset = max(float(offset), 0.5 * min(inverse_rate))
    return 1 / offset, max(float(slope), 0.0) / offset


def _one_by_one(stack: torch.Tensor, recipe: Recipe, scratch: Scratch) -> None:
    for matrix in stack:
        orthogonalize_into(matrix, matrix, recipe, scratch)


def _topology(device: torch.device, seconds: _Stopwatch, world_size: int) -> Topology:
    """Of one node: latency from a small all-to-all, bandwidth from a large one."""
    if world_size == 1:
        return Topology(ranks_per_node=1, inside_bytes_per_second=1e12, between_bytes_per_second=1e12, latency_seconds=0.0)
    measured = []
    for num_bytes in _MESSAGE_BYTES:
        sent = torch.zeros(num_bytes // world_size * world_size, dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)
        measured.append(seconds.of(partial(dist.all_to_all_single, received, sent)))
    small, large = (num_bytes * (world_size - 1) / world_size for num_bytes in _MESSAGE_BYTES)
    # A small message that took longer than half a large one was held up by something else.
    at_once = min(measured[0], measured[1] / 2)
    bandwidth = (large - small) / (measured[1] - at_once)
    latency = max(at_once - small / bandwidth, 0.0) / math.ceil(math.log2(world_size))
    return Topology(
        ranks_per_node=world_size,
        inside_bytes_per_second=bandwidth,
        between_bytes_per_second=bandwidth,
        latency_seconds=latency,
    )
