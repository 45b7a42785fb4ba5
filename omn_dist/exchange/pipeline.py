"""The pipeline of waves, in which communication and orthogonalisation overlap.

While wave i is orthogonalised, gather(i + 1) and scatter(i - 1) are in flight.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from omn_dist.exchange.numbers import (
    NOTHING,
    CopyList,
    NumberedRegion,
    Returned,
    SharedViews,
    StackNumbers,
    copies_in,
    copies_out,
    num_stack_numbers,
    numbers_at,
    plain_view,
    rows_of,
    segment_numbers,
    stack_numbers,
)
from omn_dist.exchange.route import BufferLayout, Messages, Phase, Segment, WaveRoute, wave_route
from omn_dist.exchange.teams import make_teams
from omn_dist.exchange.transport import Pending, Traffic, make_transport
from omn_dist.exchange.work import IndexedRegion, MatrixWork
from omn_dist.plan.geometry.layout import ShardRegion
from omn_dist.plan.geometry.matrix import FLAG_BYTES, NUMBER_BYTES, Matrix
from omn_dist.plan.plan import Plan


class _Presence(NamedTuple):
    """The flags of one message: does its sender have a gradient?"""

    matrices: tuple[int, ...]
    flags: Tensor
    """``[matrices]``, fp32."""


@dataclass(frozen=True, slots=True)
class _Views:
    """Views of one buffer of a wave: what is sent or received in one phase."""

    buffer: Tensor
    regions: list[IndexedRegion]
    tensors: list[Tensor]
    numbers: list[Tensor]
    """Parallel to ``tensors``: the numbers of their rows."""
    presences: list[_Presence]
    scalars: dict[int, list[Tensor]]
    """By matrix, if it has scalars: the numbers after its flag, in each message from its owner."""

    def flags(self, matrix: int) -> list[Tensor]:
        """The flags of a matrix, one scalar a message. Read only where a gradient is missing."""
        return [flags[matrices.index(matrix)] for matrices, flags in self.presences if matrix in matrices]

    @property
    def numbered_regions(self) -> Iterator[NumberedRegion]:
        """The numbers of rows with the regions that they belong to."""
        for (matrix, region), numbers in zip(self.regions, self.numbers, strict=True):
            yield matrix, region, numbers


@dataclass(frozen=True, slots=True)
class _Stacked:
    """The matrices that this rank owns in a wave."""

    groups: list[tuple[tuple[int, ...], Tensor, list[StackNumbers]]]
    by_matrix: dict[int, Tensor]
    numbers: dict[int, StackNumbers]


@dataclass(frozen=True, slots=True)
class _Wave:
    """The views that a wave needs in every step, made once from its route."""

    gather_sent: _Views
    gather_received: _Views
    scatter_sent: _Views
    scatter_received: _Views
    stacked: _Stacked
    own_regions: list[IndexedRegion]
    own_tensors: list[Tensor]
    """Views of the stack. What this rank holds of the matrices that it owns is not sent."""
    own_numbers: list[Tensor]
    own_returned: list[Returned]
    received_returned: list[Returned]
    """Parallel to the regions of ``scatter_received``."""
    numbers_in: CopyList
    """Copies of received row numbers into those of whole matrices."""
    numbers_out: CopyList


_Slot = tuple[Tensor, Tensor]
"""Sent and received bytes."""


class Pipeline:
    """Executes one plan on one rank.

    Memory is allocated once: a slot (sent and received bytes) for gathers, one for scatters, and
    the stack of whole matrices.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype,
        team_groups: Mapping[tuple[int, ...], dist.ProcessGroup] = MappingProxyType({}),
    ) -> None:
        self.plan = plan
        self._rank = rank
        routes = self._routes()
        self._transport = make_transport(plan, routes, rank, group, device)
        self._teams = make_teams(plan, rank, team_groups, self._transport.traffic)
        self.device, self._dtype = device, dtype
        most = max((route.num_stack_elements for route in routes), default=0)
        self._stack = torch.zeros(most, device=device, dtype=dtype)
        most_numbers = max((num_stack_numbers(self._owned(route)) for route in routes), default=0)
        self._numbers = torch.zeros(most_numbers, device=device, dtype=torch.float32)
        self._scatter_slot = self._slot([route.scatter for route in routes])
        self._gather_slots = [self._slot([route.gather for route in routes])]
        self._waves = self._made_waves(routes, self._gather_slots * len(routes))
        self._early: dict[int, Pending] | None = None
        self._one, self._zero = (torch.tensor(flag, device=device, dtype=torch.float32) for flag in (1.0, 0.0))

    def _routes(self) -> list[WaveRoute]:
        return [wave_route(self.plan, self._rank, wave) for wave in self.plan.waves]

    def _slot(self, messages: Sequence[Messages]) -> _Slot:
        """Sent and received bytes of the largest of these messages."""
        sizes = (
            max((message.sent.num_bytes for message in messages), default=0),
            max((message.received.num_bytes for message in messages), default=0),
        )
        sent, received = (torch.zeros(size, device=self.device, dtype=torch.uint8) for size in sizes)
        return sent, received

    def _made_waves(self, routes: list[WaveRoute], gather_slots: Sequence[_Slot]) -> list[_Wave]:
        """The waves of these routes. ``routes`` is empty afterwards.

        Each route is dropped once its wave is made: routes take more than half of the memory of
        waves.
        """
        shared = SharedViews()
        return [self._wave(routes.pop(0), slot, shared) for slot in gather_slots]

    def _wave(self, route: WaveRoute, gather_slot: _Slot, shared: SharedViews) -> _Wave:
        stacked = self._stack_views(route, shared)
        gather_sent, gather_received = gather_slot
        scatter_sent, scatter_received = self._scatter_slot
        received = self._views(route.gather.received, gather_received, "gather", shared)
        sent = self._views(route.scatter.sent, scatter_sent, "scatter", shared)
        back = self._views(route.scatter.received, scatter_received, "scatter", shared)
        matrices, whole = self.plan.matrices, stacked.numbers
        return _Wave(
            self._views(route.gather.sent, gather_sent, "gather", shared),
            received,
            sent,
            back,
            stacked,
            [IndexedRegion(*own) for own in route.own],
            [shared.keep(_region_of(stacked.by_matrix[matrix], region)) for matrix, region in route.own],
            [rows_of(whole[matrix].received, matrices[matrix], region) for matrix, region in route.own],
            [
                Returned(rows_of(whole[matrix].returned.rows, matrices[matrix], region), whole[matrix].returned.scalars)
                for matrix, region in route.own
            ],
            [Returned(rows, back.scalars.get(matrix, [NOTHING])[0]) for matrix, _, rows in back.numbered_regions],
            copies_in(matrices, whole, received.numbered_regions),
            copies_out(matrices, whole, sent.numbered_regions, sent.scalars),
        )

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent since construction."""
        return self._transport.traffic

    @property
    def temporary_bytes(self) -> int:
        """Bytes of the slots and the stack of this rank."""
        slots = [buffer for slot in (*self._gather_slots, self._scatter_slot) for buffer in slot]
        return sum(buffer.numel() * buffer.element_size() for buffer in (*slots, self._stack, self._numbers))

    def begin_early(self) -> None:
        """Allow gathers to start before the next step.

        Early gathers whose step was never taken are discarded, as by :meth:`drop_early`. The first
        call allocates a gather slot for every wave.
        """
        self.drop_early()
        if len(self._gather_slots) < len(self._waves):
            routes = self._routes()
            self._gather_slots = [self._slot([route.gather]) for route in routes]
            self._waves = self._made_waves(routes, self._gather_slots)
        self._early = {}

    def drop_early(self) -> None:
        """Discard early gathers whose step was never taken. Collective after :meth:`begin_early`.

        Gathers that this rank did not start are started now, so that all ranks have made the same
        ones.
        """
        if self._early is None:
            return
        for number in self._early_order():
            wave = self._waves[number]
            if number not in self._early:
                self._early[number] = self._transport.gather(number, wave.gather_sent.buffer, wave.gather_received.buffer)
        for pending in self._early.values():
            pending.wait()
        self._early = None

    def regions_sent(self, number: int) -> Sequence[IndexedRegion]:
        """The regions that this rank sends to owners in a wave."""
        return self._waves[number].gather_sent.regions

    def gather_early(self, number: int, work: MatrixWork) -> None:
        """Start the gather of a wave before the step. State does not change.

        All ranks start waves in the same order, from the last to the first. :meth:`run` starts the
        rest.
        """
        assert self._early is not None, "begin_early comes first"
        self._early[number] = self._launch_gather(number, work, commit=False)

    def _early_order(self) -> list[int]:
        return list(reversed(range(len(self._waves))))

    def run(self, work: MatrixWork, local_work: Callable[[], None]) -> None:
        """Run one step of all waves. Collective: all ranks of the plan call it.

        Gradients may be missing on any rank. ``local_work`` is called once, during the first
        gather, which no wave's work overlaps.

        After :meth:`begin_early` on all ranks, waves run from the last to the first, the order in
        which backward completes gradients, and all gathers are in flight at once. ``local_work``
        is then called during the last scatter. So is the commit of the state that early gathers
        did not change.
        """
        early, self._early = self._early, None
        order = list(range(len(self._waves))) if early is None else self._early_order()
        gathering = early or {}
        uncommitted = tuple(gathering)
        for number in order[:1] if early is None else order:
            if number not in gathering:
                gathering[number] = self._launch_gather(number, work, commit=True)
        if early is None:
            local_work()
        scattering: tuple[int, Pending] | None = None
        for number, following in itertools.zip_longest(order, order[1:]):
            gathering.pop(number).wait()
            present = self._unpack(number, work)
            if following is not None and following not in gathering:
                gathering[following] = self._launch_gather(following, work, commit=True)
            self._transform(number, work, present)
            if scattering is not None:
                self._finish(scattering, work)
            scattering = number, self._launch_scatter(number, work, present)
            self._apply_own(number, work, present)
        for number in uncommitted:
            work.commit(self._waves[number].gather_sent.regions)
        if early is not None:
            local_work()
        if scattering is not None:
            self._finish(scattering, work)

    def _finish(self, scattering: tuple[int, Pending], work: MatrixWork) -> None:
        number, pending = scattering
        pending.wait()
        self._apply(number, work)

    def _launch_gather(self, number: int, work: MatrixWork, *, commit: bool) -> Pending:
        wave = self._waves[number]
        with record_function(f"omn_dist::gather({number})"):
            for matrices, flags in wave.gather_sent.presences:
                present = [work.has_gradient(matrix) for matrix in matrices]
                if all(present):
                    flags.fill_(1)
                else:
                    for flag, value in zip(flags.unbind(), present, strict=True):
                        flag.fill_(value)
            work.prepare(wave.gather_sent.regions, wave.gather_sent.tensors, wave.gather_sent.numbers, commit=commit)
            return self._transport.gather(number, wave.gather_sent.buffer, wave.gather_received.buffer)

    def _unpack(self, number: int, work: MatrixWork) -> dict[int, Tensor]:
        """Copy whole directions into the stack, and say which owned matrices have a gradient.

        Returns a scalar for each owned matrix: one where any rank has a gradient, else zero.
        """
        wave = self._waves[number]
        with record_function(f"omn_dist::unpack({number})"):
            received = wave.gather_received
            if received.regions:
                torch._foreach_copy_(
                    [_region_of(wave.stacked.by_matrix[matrix], region) for matrix, region in received.regions], received.tensors
                )
            wave.numbers_in.run()
            work.prepare(wave.own_regions, wave.own_tensors, wave.own_numbers, commit=True)
            return {matrix: self._any_gradient(work, matrix, received) for matrix in wave.stacked.by_matrix}

    def _any_gradient(self, work: MatrixWork, matrix: int, received: _Views) -> Tensor:
        """One where this rank or one that sent a flag has a gradient, else zero.

        The host does not read it.
        """
        if work.has_gradient(matrix):
            return self._one
        flags = received.flags(matrix)
        return torch.stack(flags).amax() if flags else self._zero

    def _transform(self, number: int, work: MatrixWork, present: dict[int, Tensor]) -> None:
        with record_function(f"omn_dist::orthogonalize({number})"):
            for matrices, stack, numbers in self._waves[number].stacked.groups:
                first = matrices[0]
                if first not in self._teams:
                    work.transform(matrices, stack, numbers)
                    continue
                # The matrix has a gradient if any of its slices has one.
                present[first] = self._teams[first].gather(present[first]).amax()
                work.transform_slice(first, stack[0], self._teams[first])

    def _launch_scatter(self, number: int, work: MatrixWork, present: dict[int, Tensor]) -> Pending:
        wave = self._waves[number]
        with record_function(f"omn_dist::scatter({number})"):
            sent = wave.scatter_sent
            for matrices, flags in sent.presences:
                torch.stack([present[matrix] for matrix in matrices], out=flags)
            if sent.regions:
                torch._foreach_copy_(
                    sent.tensors, [_region_of(wave.stacked.by_matrix[matrix], region) for matrix, region in sent.regions]
                )
            wave.numbers_out.run()
            return self._transport.scatter(number, sent.buffer, wave.scatter_received.buffer)

    def _apply(self, number: int, work: MatrixWork) -> None:
        """Apply the updates of wave ``number`` that other ranks own."""
        received = self._waves[number].scatter_received
        with record_function(f"omn_dist::apply({number})"):
            work.apply(
                received.regions,
                received.tensors,
                [None if work.has_gradient(matrix) else received.flags(matrix)[0] for matrix, _ in received.regions],
                self._waves[number].received_returned,
            )

    def _apply_own(self, number: int, work: MatrixWork, present: dict[int, Tensor]) -> None:
        wave = self._waves[number]
        with record_function(f"omn_dist::apply_own({number})"):
            work.apply(
                wave.own_regions,
                wave.own_tensors,
                [None if work.has_gradient(matrix) else present[matrix] for matrix, _ in wave.own_regions],
                wave.own_returned,
            )

    def _views(self, layout: BufferLayout, buffer: Tensor, phase: Phase, shared: SharedViews) -> _Views:
        buffer = shared.keep(buffer[: layout.num_bytes])
        presences = []
        scalars: dict[int, list[Tensor]] = {}
        for matrices, offset, pitch in layout.flags:
            # A row for each matrix: its flag, then its scalars.
            heads = numbers_at(buffer, offset, len(matrices) * pitch // NUMBER_BYTES).view(len(matrices), -1)
            presences.append(_Presence(matrices, shared.keep(heads[:, 0])))
            if pitch > FLAG_BYTES:
                for matrix, head in zip(matrices, heads, strict=True):
                    scalars.setdefault(matrix, []).append(plain_view(head[1:]))
        return _Views(
            buffer,
            [IndexedRegion(segment.matrix, segment.region) for segment in layout.segments],
            [shared.keep(self._segment(buffer, segment)) for segment in layout.segments],
            [segment_numbers(buffer, self.plan.matrices[segment.matrix], segment, phase) for segment in layout.segments],
            presences,
            scalars,
        )

    def _owned(self, route: WaveRoute) -> list[Matrix]:
        return [self.plan.matrices[index] for group in route.owned for index in group.matrices]

    def _segment(self, buffer: Tensor, segment: Segment) -> Tensor:
        region = segment.region
        end = segment.offset + region.num_elements * self._dtype.itemsize
        return buffer[segment.offset : end].view(self._dtype).view(region.num_rows, region.num_columns)

    def _stack_views(self, route: WaveRoute, shared: SharedViews) -> _Stacked:
        groups = []
        by_matrix: dict[int, Tensor] = {}
        indices = [index for group in route.owned for index in group.matrices]
        numbers_by_matrix = dict(zip(indices, stack_numbers(self._owned(route), self._numbers), strict=True))
        for group in route.owned:
            matrix = self.plan.matrices[group.matrices[0]]
            views = self._stack.as_strided(
                (len(group.matrices), matrix.stored_rows, matrix.stored_columns),
                (group.pitch, matrix.stored_columns, 1),
                group.offset,
            )
            groups.append((group.matrices, shared.keep(views), [numbers_by_matrix[index] for index in group.matrices]))
            by_matrix.update(zip(group.matrices, map(shared.keep, views.unbind()), strict=True))
        return _Stacked(groups, by_matrix, numbers_by_matrix)


def _region_of(matrix: Tensor, region: ShardRegion) -> Tensor:
    return matrix[
        region.matrix_row : region.matrix_row + region.num_rows,
        region.matrix_column : region.matrix_column + region.num_columns,
    ]
