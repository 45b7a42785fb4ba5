"""A predicted step: what every rank does at what time, in the order of ``exchange/pipeline.py``."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omn_dist.plan.geometry.matrix import Matrix
from omn_dist.plan.geometry.traffic import Counts
from omn_dist.plan.plan import Plan
from omn_dist.plan.predict.devices import Device, Topology
from omn_dist.plan.predict.seconds import matrix_seconds

Seconds = NDArray[np.float64]
Activity = Literal["prepare", "adamw", "wait", "unpack", "orthogonalize", "pack", "apply", "gather", "scatter"]

# Bytes of fp32 numbers read and written for one element. Prepare: gradient, momentum -> momentum,
# direction; unpack and pack: a copy; apply: parameter, update -> parameter. Fused AdamW: gradient,
# two moments, parameter -> two moments, parameter; in single operations, the sum over lerp, mul,
# addcmul, sqrt, div, add and addcdiv.
_PREPARE_BYTES, _COPY_BYTES, _APPLY_BYTES = 4 * 4, 2 * 4, 3 * 4
_FUSED_ADAMW_BYTES, _ADAMW_BYTES = 7 * 4, 18 * 4
_ADAMW_LAUNCHES = 10
# For one region: kernels, and calls without a kernel (views, and each copy of a foreach call).
_PREPARE_CALLS, _UNPACK_CALLS, _PACK_CALLS, _APPLY_CALLS = (5, 9), (0, 3), (1, 2), (2, 5)
_SETUP_VIEWS = 18
"""For one matrix: views of its shard, gradient and state, and checks that take as long as some."""


class Event(NamedTuple):
    """One activity of one wave on all ranks; start and end in seconds, ``[world_size]`` each."""

    activity: Activity
    wave: int
    start: Seconds
    end: Seconds


@dataclass(frozen=True)
class Timeline:
    """A predicted step of the optimizer, from the first direction to the last applied update."""

    events: tuple[Event, ...]
    adamw_seconds: float
    """AdamW of all parameters on the same ranks: a step without Muon, for comparison."""

    @property
    def seconds(self) -> float:
        """Seconds of the step on the slowest rank."""
        return max((float(event.end.max()) for event in self.events), default=0.0)

    @cached_property
    def exposed_seconds(self) -> Seconds:
        """``[world_size]``: seconds that each rank waits for messages or for other ranks."""
        total: Seconds = sum((event.end - event.start for event in self.events if event.activity == "wait"), np.zeros(1))
        return total

    def share(self, activity: Activity) -> float:
        """Mean over ranks of the activity's seconds, as a fraction of the step."""
        total = sum(float((event.end - event.start).mean()) for event in self.events if event.activity == activity)
        return total / self.seconds if self.seconds else 0.0


class _Clock:
    """The time of every rank, and of the network that the ranks share."""

    def __init__(self, world_size: int, device: Device, ranks_per_node: int) -> None:
        self.now: Seconds = np.zeros(world_size)
        self.events: list[Event] = []
        self._network = 0.0
        self._device = device
        self._ranks_per_node = ranks_per_node

    def work(self, activity: Activity, wave: int, seconds: Seconds | float) -> None:
        start = self.now
        self.now = start + shared_cores(np.broadcast_to(seconds, start.shape), self._device.ranks_per_core, self._ranks_per_node)
        self.events.append(Event(activity, wave, start, self.now))

    def launch(self, activity: Activity, wave: int, seconds: float) -> float:
        """Start a collective when all ranks and the last collective are ready; returns its end."""
        start = max(float(self.now.max()), self._network)
        self._network = start + seconds
        begin, end = np.full_like(self.now, start), np.full_like(self.now, self._network)
        self.events.append(Event(activity, wave, begin, end))
        if not self._device.overlaps:
            # The ranks' own cores move the messages.
            self.now = self.now + seconds
        return self._network

    def wait(self, wave: int, until: float) -> None:
        start = self.now
        self.now = np.maximum(start, until)
        self.events.append(Event("wait", wave, start, self.now))


def shared_cores(seconds: Seconds, ranks_per_core: float, ranks_per_node: int) -> Seconds:
    """``[world_size]``: when ranks that start together and share cores end work of ``seconds``.

    ``seconds`` is the time with all ranks of a node busy to the end. Ranks that still work share
    the cores of those that are done, up to one core each.
    """
    if ranks_per_core <= 1:
        return seconds
    ends = np.empty_like(seconds)
    for first in range(0, len(seconds), ranks_per_node):
        node = seconds[first : first + ranks_per_node]
        order = np.argsort(node)
        faster = np.minimum(ranks_per_core, len(node) / np.arange(len(node), 0, -1))
        ends[first + order] = np.cumsum(np.diff(node[order], prepend=0.0) / faster)
    return ends


def simulate(plan: Plan, device: Device, topology: Topology | None = None, *, num_adamw_elements: int = 0) -> Timeline:
    """The predicted step of ``plan`` on these devices.

    The gather of a wave is launched before the previous wave is orthogonalised; its scatter is
    awaited after the next wave is. A collective starts when the last rank has reached it and the
    collective before it is done.

    Args:
        plan: owners and waves.
        device: what each rank computes with.
        topology: the network; the device's own when ``None``.
        num_adamw_elements: elements, over all ranks, that AdamW updates beside the first gather.

    Not collective.
    """
    topology = device.topology if topology is None else topology
    world_size = plan.world_size
    counter = plan.traffic_counter()
    traffic = counter.step_traffic(plan.waves)
    transform = _transform_seconds(plan, device, topology)
    # Elements; the flags in the messages are few enough to count with them.
    sent = traffic.gather_sent / plan.communication_itemsize
    received = traffic.gather_received / plan.communication_itemsize
    packed = traffic.scatter_sent / plan.communication_itemsize
    returned = traffic.scatter_received / plan.communication_itemsize
    owned = traffic.stack / plan.communication_itemsize
    own = np.maximum(owned - received, 0.0)
    # Regions of owned matrices and of others, and messages about owned matrices.
    own_regions = np.zeros_like(traffic.stack)
    messages = np.zeros_like(traffic.stack)
    for number, indices in enumerate(plan.waves):
        for index in indices:
            own_regions[number, plan.owners[index]] += 1
            messages[number, plan.owners[index]] += max(counter.num_holders(index) - 1, 0)
    other_regions = np.maximum(counter.num_held(plan.waves) - own_regions, 0)

    def elementwise_seconds(elements: Seconds, num_bytes: int, regions: Counts, calls: tuple[int, int]) -> Seconds:
        num_kernels, num_views = calls
        seconds_a_region = num_kernels * device.launch_seconds + num_views * device.view_seconds
        return elements * num_bytes / device.memory_bytes_per_second + regions * seconds_a_region

    adamw_bytes = _FUSED_ADAMW_BYTES if device.fused_adamw else _ADAMW_BYTES

    def seconds_of_adamw(elements: int) -> float:
        seconds = elements / world_size * adamw_bytes / device.memory_bytes_per_second
        return seconds + _ADAMW_LAUNCHES * device.launch_seconds

    def seconds_in_flight(out: Counts, back: Counts) -> float:
        return topology.exchange_seconds(float(max(out.max(), back.max())), world_size)

    clock = _Clock(world_size, device, topology.ranks_per_node)

    def launch_gather(wave: int) -> float:
        clock.work("prepare", wave, elementwise_seconds(sent[wave], _PREPARE_BYTES, other_regions[wave], _PREPARE_CALLS))
        return clock.launch("gather", wave, seconds_in_flight(traffic.gather_sent[wave], traffic.gather_received[wave]))

    def apply_returned(wave: int) -> None:
        clock.work("apply", wave, elementwise_seconds(returned[wave], _APPLY_BYTES, other_regions[wave], _APPLY_CALLS))

    num_waves = len(plan.waves)
    clock.work("prepare", 0, len(plan.matrices) * _SETUP_VIEWS * device.view_seconds)
    gathered = launch_gather(0) if num_waves else 0.0
    clock.work("adamw", 0, seconds_of_adamw(num_adamw_elements))
    scattered = 0.0
    for wave in range(num_waves):
        clock.wait(wave, gathered)
        clock.work(
            "unpack",
            wave,
            elementwise_seconds(received[wave], _COPY_BYTES, messages[wave], _UNPACK_CALLS)
            + elementwise_seconds(own[wave], _PREPARE_BYTES, own_regions[wave], _PREPARE_CALLS),
        )
        if wave + 1 < num_waves:
            gathered = launch_gather(wave + 1)
        clock.work("orthogonalize", wave, transform[wave])
        if wave:
            clock.wait(wave - 1, scattered)
            apply_returned(wave - 1)
        clock.work("pack", wave, elementwise_seconds(packed[wave], _COPY_BYTES, messages[wave], _PACK_CALLS))
        scattered = clock.launch("scatter", wave, seconds_in_flight(traffic.scatter_sent[wave], traffic.scatter_received[wave]))
        clock.work("apply", wave, elementwise_seconds(own[wave], _APPLY_BYTES, own_regions[wave], _APPLY_CALLS))
    if num_waves:
        clock.wait(num_waves - 1, scattered)
        apply_returned(num_waves - 1)
    all_elements = sum(matrix.num_elements for matrix in plan.matrices) + num_adamw_elements
    return Timeline(tuple(clock.events), seconds_of_adamw(all_elements))


def _transform_seconds(plan: Plan, device: Device, topology: Topology) -> Sequence[Seconds]:
    """Newton-Schulz seconds of each wave, ``[world_size]`` each; a team starts together."""
    by_kind: dict[tuple[object, ...], float] = {}

    def cached_seconds(matrix: Matrix) -> float:
        kind = (matrix.stored_rows, matrix.stored_columns, matrix.work, matrix.team_bytes)
        if kind not in by_kind:
            by_kind[kind] = matrix_seconds(matrix, device, topology)
        return by_kind[kind]

    found = []
    for wave in plan.waves:
        total = np.zeros(plan.world_size)
        matrices = [plan.matrices[index] for index in wave]
        longest_slices: dict[str, float] = {}
        for matrix in matrices:
            if matrix.slice is not None:
                name = matrix.slice.whole
                longest_slices[name] = max(longest_slices.get(name, 0.0), cached_seconds(matrix))
        for name, longest in longest_slices.items():
            team = list(plan.teams[name])
            total[team] = total[team].max() + longest
        alone = [index for index, matrix in zip(wave, matrices, strict=True) if matrix.slice is None]
        np.add.at(total, [plan.owners[index] for index in alone], [cached_seconds(plan.matrices[index]) for index in alone])
        found.append(total)
    return found
