"""A step in time: what every rank does when, with the order of work of ``exchange/pipeline.py``."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omn_dist.plan.cost import newton_schulz_seconds, slice_seconds
from omn_dist.plan.devices import Device, Topology
from omn_dist.plan.matrix import Matrix
from omn_dist.plan.ownership import Plan
from omn_dist.plan.tally import Tally

Seconds = NDArray[np.float64]
Activity = Literal["prepare", "adamw", "wait", "unpack", "orthogonalize", "pack", "apply", "gather", "scatter"]

# Bytes of fp32 numbers read and written for one element. Prepare: gradient, momentum -> momentum, direction; unpack and pack: a
# copy; apply: parameter, update -> parameter. AdamW fused: gradient, two moments, parameter -> two moments, parameter; in seven
# calls (lerp, mul, addcmul, sqrt, div, add, addcdiv), what each of them reads and writes.
_PREPARE_BYTES, _COPY_BYTES, _APPLY_BYTES = 4 * 4, 2 * 4, 3 * 4
_FUSED_ADAMW_BYTES, _ADAMW_BYTES = 7 * 4, 18 * 4
_ADAMW_LAUNCHES = 10
# Counted for one rectangle: kernels, and calls without one of their own, which are views and the copies of one foreach call.
_PREPARE_CALLS, _UNPACK_CALLS, _PACK_CALLS, _APPLY_CALLS = (5, 9), (0, 3), (1, 2), (2, 5)
_SETUP_VIEWS = 18
"""Of one matrix before its direction: its local shard, gradient and state, and checks that take as long as so many views."""


class Event(NamedTuple):
    """One activity of one wave on all ranks: when it starts and ends, in seconds, ``[world_size]`` each."""

    activity: Activity
    wave: int
    start: Seconds
    end: Seconds


@dataclass(frozen=True)
class Timeline:
    """A predicted step of the optimizer, from the first direction to the last applied update."""

    events: tuple[Event, ...]
    adamw_seconds: float
    """AdamW of all parameters, on shards of the same ranks: what a step without Muon would take."""

    @property
    def seconds(self) -> float:
        """Seconds of the step on the slowest rank."""
        return max((float(event.end.max()) for event in self.events), default=0.0)

    @cached_property
    def exposed_seconds(self) -> Seconds:
        """``[world_size]``: seconds that each rank waits for messages or for others."""
        total: Seconds = sum((event.end - event.start for event in self.events if event.activity == "wait"), np.zeros(1))
        return total

    def share(self, activity: Activity) -> float:
        """Mean over ranks of the activity's seconds, as a fraction of the step."""
        total = sum(float((event.end - event.start).mean()) for event in self.events if event.activity == activity)
        return total / self.seconds if self.seconds else 0.0


class _Clock:
    """The time of every rank, and of the network that they share."""

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
        """Start a collective when all ranks are there and the last one is done; returns when it ends."""
        start = max(float(self.now.max()), self._network)
        self._network = start + seconds
        begin, end = np.full_like(self.now, start), np.full_like(self.now, self._network)
        self.events.append(Event(activity, wave, begin, end))
        if not self._device.overlaps:
            # The ranks' own cores carry the messages.
            self.now = self.now + seconds
        return self._network

    def wait(self, wave: int, until: float) -> None:
        start = self.now
        self.now = np.maximum(start, until)
        self.events.append(Event("wait", wave, start, self.now))


def shared_cores(seconds: Seconds, ranks_per_core: float, ranks_per_node: int) -> Seconds:
    """When work ends that all ranks start together, and that would take ``seconds`` with all ranks of a node busy to the end.

    Those that still work share the cores of those that are done, up to a core each.
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
    """The step of ``plan`` on these devices.

    A gather is launched before the wave before it is orthogonalised, a scatter is awaited after the next wave is; collectives
    start when the last rank has come and follow each other on one communicator.

    Args:
        plan: owners and waves.
        device: what each rank computes with.
        topology: the network; the device's own when ``None``.
        num_adamw_elements: elements of parameters that take AdamW beside the first gather, over all ranks.

    Not collective.
    """
    topology = device.topology if topology is None else topology
    world_size = plan.world_size
    tally = Tally(plan.matrices, plan.owners, world_size, plan.wire_itemsize)
    traffic = tally.traffic(plan.waves)
    transform = _transform_seconds(plan, device, topology)
    # Without the flags, which are few.
    sent = traffic.gather_sent / plan.wire_itemsize
    received = traffic.gather_received / plan.wire_itemsize
    packed = traffic.scatter_sent / plan.wire_itemsize
    returned = traffic.scatter_received / plan.wire_itemsize
    owned = traffic.stack / plan.wire_itemsize
    own = np.maximum(owned - received, 0.0)
    own_parts = np.zeros_like(traffic.stack)
    messages = np.zeros_like(traffic.stack)
    for number, indices in enumerate(plan.waves):
        for index in indices:
            own_parts[number, plan.owners[index]] += 1
            messages[number, plan.owners[index]] += max(tally.num_holders(index) - 1, 0)
    other_parts = np.maximum(tally.parts(plan.waves) - own_parts, 0)

    def elementwise(elements: Seconds, num_bytes: int, parts: NDArray[np.int64], calls: tuple[int, int]) -> Seconds:
        kernels, views = calls
        a_part = kernels * device.launch_seconds + views * device.view_seconds
        return elements * num_bytes / device.memory_bytes_per_second + parts * a_part

    adamw_bytes = _FUSED_ADAMW_BYTES if device.fused_adamw else _ADAMW_BYTES

    def adamw(elements: int) -> float:
        seconds = elements / world_size * adamw_bytes / device.memory_bytes_per_second
        return seconds + _ADAMW_LAUNCHES * device.launch_seconds

    all_elements = sum(matrix.num_elements for matrix in plan.matrices) + num_adamw_elements

    def exchange(out: NDArray[np.int64], back: NDArray[np.int64]) -> float:
        return topology.exchange_seconds(float(max(out.max(), back.max())), world_size)

    clock = _Clock(world_size, device, topology.ranks_per_node)

    def gather(wave: int) -> float:
        clock.work("prepare", wave, elementwise(sent[wave], _PREPARE_BYTES, other_parts[wave], _PREPARE_CALLS))
        return clock.launch("gather", wave, exchange(traffic.gather_sent[wave], traffic.gather_received[wave]))

    def apply(wave: int) -> None:
        clock.work("apply", wave, elementwise(returned[wave], _APPLY_BYTES, other_parts[wave], _APPLY_CALLS))

    num_waves = len(plan.waves)
    clock.work("prepare", 0, len(plan.matrices) * _SETUP_VIEWS * device.view_seconds)
    gathered = gather(0) if num_waves else 0.0
    clock.work("adamw", 0, adamw(num_adamw_elements))
    scattered = 0.0
    for wave in range(num_waves):
        clock.wait(wave, gathered)
        clock.work(
            "unpack",
            wave,
            elementwise(received[wave], _COPY_BYTES, messages[wave], _UNPACK_CALLS)
            + elementwise(own[wave], _PREPARE_BYTES, own_parts[wave], _PREPARE_CALLS),
        )
        if wave + 1 < num_waves:
            gathered = gather(wave + 1)
        clock.work("orthogonalize", wave, transform[wave])
        if wave:
            clock.wait(wave - 1, scattered)
            apply(wave - 1)
        clock.work("pack", wave, elementwise(packed[wave], _COPY_BYTES, messages[wave], _PACK_CALLS))
        scattered = clock.launch("scatter", wave, exchange(traffic.scatter_sent[wave], traffic.scatter_received[wave]))
        clock.work("apply", wave, elementwise(own[wave], _APPLY_BYTES, own_parts[wave], _APPLY_CALLS))
    if num_waves:
        clock.wait(num_waves - 1, scattered)
        apply(num_waves - 1)
    return Timeline(tuple(clock.events), adamw(all_elements))


def matrix_seconds(matrix: Matrix, device: Device, topology: Topology) -> float:
    """Seconds of the Newton-Schulz of a matrix at its owner, or of a slice together with its team."""
    if matrix.slice is None:
        return newton_schulz_seconds(
            matrix.stored_rows, matrix.stored_columns, matrix.num_steps, device, matrix.itemsize, matrix.form
        )
    return slice_seconds(*matrix.slice_sides, matrix.num_steps, matrix.slice.size, device, topology, matrix.itemsize, matrix.form)


def _transform_seconds(plan: Plan, device: Device, topology: Topology) -> Sequence[Seconds]:
    """For each wave ``[world_size]``: seconds of the Newton-Schulz of what each rank owns. Members of a team start together."""
    by_kind: dict[tuple[object, ...], float] = {}

    def seconds(matrix: Matrix) -> float:
        kind = (matrix.stored_rows, matrix.stored_columns, matrix.num_steps, matrix.form, matrix.itemsize, matrix.team_bytes)
        if kind not in by_kind:
            by_kind[kind] = matrix_seconds(matrix, device, topology)
        return by_kind[kind]

    found = []
    for wave in plan.waves:
        total = np.zeros(plan.world_size)
        matrices = [plan.matrices[index] for index in wave]
        teams: dict[str, float] = {}
        for matrix in matrices:
            if matrix.slice is not None:
                teams[matrix.slice.whole] = max(teams.get(matrix.slice.whole, 0.0), seconds(matrix))
        for name, longest in teams.items():
            team = list(plan.teams[name])
            total[team] = total[team].max() + longest
        alone = [index for index, matrix in zip(wave, matrices, strict=True) if matrix.slice is None]
        np.add.at(total, [plan.owners[index] for index in alone], [seconds(plan.matrices[index]) for index in alone])
        found.append(total)
    return found
