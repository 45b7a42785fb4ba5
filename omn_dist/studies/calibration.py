"""Measure this machine, so that predictions use its own rates instead of a data sheet's."""

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

from omn_dist.algorithms.newton_schulz import RECIPES, Recipe, orthogonalize_into
from omn_dist.algorithms.scratch import Scratch
from omn_dist.kernels import Kernels, choose_kernels
from omn_dist.plan.geometry.flops import newton_schulz_flops
from omn_dist.plan.geometry.matrix import Work
from omn_dist.plan.predict.devices import Device, Topology
from omn_dist.plan.predict.seconds import newton_schulz_seconds

_STEPS = 5
# (rows, columns) of the matrices to orthogonalise. Launches dominate the first, products the last.
_CPU_SHAPES = ((96, 192), (192, 384), (256, 688), (384, 768))
_GPU_SHAPES = ((256, 512), (512, 1024), (1024, 2048), (2048, 5504))
_ELEMENTS = 1 << 22
_MESSAGE_BYTES = (1 << 12, 1 << 22)


def calibrate(device: torch.device, *, repeats: int = 5, itemsizes: Sequence[int] = (4,), num_elements: int = _ELEMENTS) -> Device:
    """Measure small operations, memory, Newton-Schulz and, with a process group, an all-to-all.

    Takes seconds. All ranks measure at the same time, as they compute in a step, so ranks that
    share cores measure their share of the machine. The slowest rank counts.

    Args:
        device: the device of the tensors.
        repeats: how often each number is measured.
        num_elements: elements of one rank's shard of all parameters; a shard that fits into a cache
            is read faster.
        itemsizes: 4 to measure fp32 products, 2 for bf16. A rate that is not measured is set to the
            measured one.

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
        # The host makes the views of a GPU's tensors while the GPU computes.
        view_seconds=view if device.type == "cpu" else 0.0,
        overlaps=device.type != "cpu",
        ranks_per_core=max(1.0, world_size * torch.get_num_threads() / num_cores()) if device.type == "cpu" else 1.0,
        fused_adamw=device.type != "cpu" or choose_kernels().fuses_adamw,
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
    """Write the file that ``omn-dist plan --device FILE.json`` reads."""
    path.write_text(json.dumps(dataclasses.asdict(device), indent=1) + "\n")


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slowest_machine(spans: Iterable[Sequence[float]]) -> float:
    """The longest time between a machine's first start and its last end.

    ``spans`` has (machine, start, end) of every rank, in seconds.
    """
    by_machine: dict[float, tuple[float, float]] = {}
    for machine, start, end in spans:
        first, last = by_machine.get(machine, (start, end))
        by_machine[machine] = (min(first, start), max(last, end))
    return max(last - first for first, last in by_machine.values())


class _Stopwatch:
    """Measures the seconds of the slowest rank, as the median over repeats.

    CPU ranks of one machine share its cores and its clock. There the time counts from the first
    rank's start to the last rank's end: a rank that got its core late had it for itself then, and
    its own time would be too short.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device = device
        self._repeats = repeats

    def of(self, work: Callable[[], object]) -> float:
        """Seconds of ``work``, after a first run that is not measured."""
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
        """The time of the slowest rank. Collective."""
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
    """The rate R of large products, and the short side h at which the rate is half of R.

    With s the short side, ``1 / rate(s) = 1 / R + h / (R s)`` is a line in 1 / s. It is fitted to
    the measured times without launches and memory.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    inverse_side, inverse_rate = [], []
    kernels = choose_kernels()
    shapes = _CPU_SHAPES if device.type == "cpu" else _GPU_SHAPES
    for shape in shapes:
        # Enough matrices for milliseconds of work, one after the other and in place, as in a step.
        count = max(1, shapes[-1][0] * shapes[-1][1] // (shape[0] * shape[1]))
        recipe = RECIPES["omn" if itemsize == 4 else "torch"]
        stack = torch.randn((count, *shape), generator=generator).to(device, recipe.input_dtype)
        if device.type == "cpu":
            kernels.warm_up([shape], recipe.dtype)
        measured = seconds.of(partial(_one_by_one, stack, recipe, Scratch(), kernels)) / count
        rest = measured - newton_schulz_seconds(*shape, Work(_STEPS, itemsize=itemsize), blank)
        inverse_side.append(1 / min(shape))
        inverse_rate.append(max(rest, 0.1 * measured) / newton_schulz_flops(*shape, _STEPS))
    # The weights make errors relative; otherwise the small matrices would dominate.
    weights = 1 / np.array(inverse_rate)
    slope, offset = np.polyfit(inverse_side, inverse_rate, 1, w=weights)
    offset = max(float(offset), 0.5 * min(inverse_rate))
    return 1 / offset, max(float(slope), 0.0) / offset


def _one_by_one(stack: torch.Tensor, recipe: Recipe, scratch: Scratch, kernels: Kernels) -> None:
    for matrix in stack:
        orthogonalize_into(matrix, matrix, recipe, scratch, kernels)


def _topology(device: torch.device, seconds: _Stopwatch, world_size: int) -> Topology:
    """A single node: latency from a small all-to-all, bandwidth from a large one."""
    if world_size == 1:
        return Topology(ranks_per_node=1, inside_bytes_per_second=1e12, between_bytes_per_second=1e12, latency_seconds=0.0)
    measured = []
    for num_bytes in _MESSAGE_BYTES:
        sent = torch.zeros(num_bytes // world_size * world_size, dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)
        measured.append(seconds.of(partial(dist.all_to_all_single, received, sent)))
    small, large = (num_bytes * (world_size - 1) / world_size for num_bytes in _MESSAGE_BYTES)
    # A small message that takes longer than half a large one was delayed by something else.
    at_once = min(measured[0], measured[1] / 2)
    bandwidth = (large - small) / (measured[1] - at_once)
    latency = max(at_once - small / bandwidth, 0.0) / math.ceil(math.log2(world_size))
    return Topology(
        ranks_per_node=world_size,
        inside_bytes_per_second=bandwidth,
        between_bytes_per_second=bandwidth,
        latency_seconds=latency,
    )
