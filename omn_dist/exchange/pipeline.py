"""The pipeline of waves: gather(i + 1) and scatter(i - 1) are in flight while wave i is orthogonalised."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from omn_dist.algorithms.row_numbers import NUMBER_BYTES
from omn_dist.algorithms.team_newton_schulz import Team
from omn_dist.exchange.numbers import (
    NOTHING,
    Copies,
    Rectangle,
    Returned,
    SharedViews,
    StackNumbers,
    copies_in,
    copies_out,
    kept,
    num_stack_numbers,
    numbers_at,
    part_numbers,
    rows_of,
    stack_numbers,
)
from omn_dist.exchange.route import Part, Passage, Side, WaveRoute, Way, wave_route
from omn_dist.exchange.teams import make_teams
from omn_dist.exchange.transport import Pending, Traffic, make_transport
from omn_dist.plan.layout import Segment
from omn_dist.plan.matrix import FLAG_BYTES, Matrix
from omn_dist.plan.ownership import Plan


class Place(NamedTuple):
    """A rectangle of one of this rank's shards. Matrices are named by their index in the plan."""

    matrix: int
    segment: Segment


class MatrixWork(Protocol):
    """What the pipeline asks of an algorithm, many rectangles or matrices at a time.

    Row numbers are those that the plan's matrices ask for; most ask for none, and theirs are empty tensors.
    """

    def has_gradient(self, matrix: int) -> bool:
        """Whether this rank has a gradient for the parameter of the matrix."""
        ...

    def prepare(self, places: Sequence[Place], directions: Sequence[Tensor], numbers: Sequence[Tensor], *, commit: bool) -> None:
        """Write the directions and row numbers of local rectangles; a missing gradient counts as zeros.

        ``commit`` lets it bring the momentum of the rectangles up to date as well, where this rank has a gradient; else it
        changes nothing.
        """
        ...

    def commit(self, places: Sequence[Place]) -> None:
        """Bring the momentum up to date of rectangles that were prepared without."""
        ...

    def transform(self, matrices: Sequence[int], stack: Tensor, numbers: Sequence[StackNumbers]) -> None:
        """Directions of whole matrices of one shape to their updates, in place: ``[matrices, stored rows, stored columns]``."""
        ...

    def transform_slice(self, matrix: int, direction: Tensor, team: Team) -> None:
        """The direction of a slice ``[stored rows, stored columns]`` to its update, in place, together with its team."""
        ...

    def apply(
        self,
        places: Sequence[Place],
        updates: Sequence[Tensor],
        present: Sequence[Tensor | None],
        returned: Sequence[Returned],
    ) -> None:
        """Commit local rectangles.

        ``present`` is None where this rank has a gradient itself, else a scalar: 1 where some rank has one, 0 where none
        has and nothing may change.
        """
        ...


class _Presence(NamedTuple):
    """Flags of one message as they lie in it."""

    matrices: tuple[int, ...]
    flags: Tensor
    """``[matrices]``, fp32."""


@dataclass(frozen=True, slots=True)
class _Views:
    """A side of a wave as views of its buffer."""

    buffer: Tensor
    places: list[Place]
    tensors: list[Tensor]
    numbers: list[Tensor]
    """Parallel to ``tensors``: the numbers of their rows."""
    presences: list[_Presence]
    scalars: dict[int, list[Tensor]]
    """Of each matrix that has some, what follows the flag in each message from its owner."""

    def flags(self, matrix: int) -> list[Tensor]:
        """Of a matrix, one scalar a message. Looked up only where a gradient is missing."""
        return [flags[matrices.index(matrix)] for matrices, flags in self.presences if matrix in matrices]

    @property
    def rectangles(self) -> Iterator[Rectangle]:
        """The numbers with the rectangles that they are about."""
        for (matrix, segment), numbers in zip(self.places, self.numbers, strict=True):
            yield matrix, segment, numbers


@dataclass(frozen=True, slots=True)
class _Stacked:
    """The matrices that this rank owns in a wave."""

    groups: list[tuple[tuple[int, ...], Tensor, list[StackNumbers]]]
    by_matrix: dict[int, Tensor]
    numbers: dict[int, StackNumbers]


@dataclass(frozen=True, slots=True)
class _Wave:
    """What a wave needs in every step. Its route is not among it, only what was made from it."""

    gather_sent: _Views
    gather_received: _Views
    scatter_sent: _Views
    scatter_received: _Views
    stacked: _Stacked
    own_places: list[Place]
    own_tensors: list[Tensor]
    """Views of the stack: what does not travel."""
    own_numbers: list[Tensor]
    own_returned: list[Returned]
    received_returned: list[Returned]
    """Parallel to what ``scatter_received`` holds."""
    numbers_in: Copies
    """Row numbers of what travels, into the stack."""
    numbers_out: Copies


_Slot = tuple[Tensor, Tensor]
"""Sent and received bytes."""


class Pipeline:
    """Executes one plan on one rank.

    Memory is allocated once: a slot (sent and received bytes) for gathers, one for scatters, and the stack of whole matrices.
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

    def _slot(self, passages: Sequence[Passage]) -> _Slot:
        """Sent and received bytes of the largest of these passages."""
        sizes = (
            max((passage.sent.num_bytes for passage in passages), default=0),
            max((passage.received.num_bytes for passage in passages), default=0),
        )
        sent, received = (torch.zeros(size, device=self.device, dtype=torch.uint8) for size in sizes)
        return sent, received

    def _made_waves(self, routes: list[WaveRoute], gather_slots: Sequence[_Slot]) -> list[_Wave]:
        """Empties ``routes``: together they would take more than half of what is made of them."""
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
            [Place(*own) for own in route.own],
            [shared.keep(_cut(stacked.by_matrix[matrix], segment)) for matrix, segment in route.own],
            [rows_of(whole[matrix].received, matrices[matrix], segment) for matrix, segment in route.own],
            [
                Returned(rows_of(whole[matrix].returned.rows, matrices[matrix], segment), whole[matrix].returned.scalars)
                for matrix, segment in route.own
            ],
            [Returned(rows, back.scalars.get(matrix, [NOTHING])[0]) for matrix, _, rows in back.rectangles],
            copies_in(matrices, whole, received.rectangles),
            copies_out(matrices, whole, sent.rectangles, sent.scalars),
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
        """From here to the next step gathers may leave early. Drops what left before and no step took.

        Every wave gets a gather slot of its own, once.
        """
        self.drop_early()
        if len(self._gather_slots) < len(self._waves):
            routes = self._routes()
            self._gather_slots = [self._slot([route.gather]) for route in routes]
            self._waves = self._made_waves(routes, self._gather_slots)
        self._early = {}

    def drop_early(self) -> None:
        """Forget what left early for a step that never came. Collective when :meth:`begin_early` was the last call.

        Gathers that did not leave are made up for, so that all ranks have been through the same ones.
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

    def places_sent(self, number: int) -> Sequence[Place]:
        """The rectangles of this rank that travel to owners in a wave."""
        return self._waves[number].gather_sent.places

    def gather_early(self, number: int, work: MatrixWork) -> None:
        """Let the directions of a wave leave before the step, without a change of momentum.

        All ranks let the same waves leave in the same order, from the last to the first; ``run`` makes up for those that did not.
        """
        assert self._early is not None, "begin_early comes first"
        self._early[number] = self._launch_gather(number, work, commit=False)

    def _early_order(self) -> list[int]:
        return list(reversed(range(len(self._waves))))

    def run(self, work: MatrixWork, local_work: Callable[[], None]) -> None:
        """One step of all waves. Collective: all ranks of the plan call it, with whatever gradients they have.

        After :meth:`begin_early` on all ranks, waves go from the last to the first, like gradients in backward, and all gathers
        are in flight at once. ``local_work`` is called once, beside a transfer that no wave's work hides: the first gather, or
        where gathers left early the last scatter. What is left of the momentum then is brought up to date there too.
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
            work.commit(self._waves[number].gather_sent.places)
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
            work.prepare(wave.gather_sent.places, wave.gather_sent.tensors, wave.gather_sent.numbers, commit=commit)
            return self._transport.gather(number, wave.gather_sent.buffer, wave.gather_received.buffer)

    def _unpack(self, number: int, work: MatrixWork) -> dict[int, Tensor]:
        """Whole directions into the stack; returns for each owned matrix whether any rank has a gradient (a scalar)."""
        wave = self._waves[number]
        with record_function(f"omn_dist::unpack({number})"):
            received = wave.gather_received
            if received.places:
                torch._foreach_copy_(
                    [_cut(wave.stacked.by_matrix[matrix], segment) for matrix, segment in received.places], received.tensors
                )
            wave.numbers_in.run()
            work.prepare(wave.own_places, wave.own_tensors, wave.own_numbers, commit=True)
            return {matrix: self._any_gradient(work, matrix, received) for matrix in wave.stacked.by_matrix}

    def _any_gradient(self, work: MatrixWork, matrix: int, received: _Views) -> Tensor:
        """One where this rank or one that sent a flag has a gradient, else zero; never read on the host here."""
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
                # A gradient of any part of the matrix is one of the whole.
                present[first] = self._teams[first].gather(present[first]).amax()
                work.transform_slice(first, stack[0], self._teams[first])

    def _launch_scatter(self, number: int, work: MatrixWork, present: dict[int, Tensor]) -> Pending:
        wave = self._waves[number]
        with record_function(f"omn_dist::scatter({number})"):
            sent = wave.scatter_sent
            for matrices, flags in sent.presences:
                torch.stack([present[matrix] for matrix in matrices], out=flags)
            if sent.places:
                torch._foreach_copy_(
                    sent.tensors, [_cut(wave.stacked.by_matrix[matrix], segment) for matrix, segment in sent.places]
                )
            wave.numbers_out.run()
            return self._transport.scatter(number, sent.buffer, wave.scatter_received.buffer)

    def _apply(self, number: int, work: MatrixWork) -> None:
        """Commit the parts of wave ``number`` that other ranks own."""
        received = self._waves[number].scatter_received
        with record_function(f"omn_dist::apply({number})"):
            work.apply(
                received.places,
                received.tensors,
                [None if work.has_gradient(matrix) else received.flags(matrix)[0] for matrix, _ in received.places],
                self._waves[number].received_returned,
            )

    def _apply_own(self, number: int, work: MatrixWork, present: dict[int, Tensor]) -> None:
        wave = self._waves[number]
        with record_function(f"omn_dist::apply_own({number})"):
            work.apply(
                wave.own_places,
                wave.own_tensors,
                [None if work.has_gradient(matrix) else present[matrix] for matrix, _ in wave.own_places],
                wave.own_returned,
            )

    def _views(self, side: Side, buffer: Tensor, way: Way, shared: SharedViews) -> _Views:
        buffer = shared.keep(buffer[: side.num_bytes])
        presences = []
        scalars: dict[int, list[Tensor]] = {}
        for matrices, offset, pitch in side.flags:
            # A row for each matrix: its flag, then its scalars.
            heads = numbers_at(buffer, offset, len(matrices) * pitch // NUMBER_BYTES).view(len(matrices), -1)
            presences.append(_Presence(matrices, shared.keep(heads[:, 0])))
            if pitch > FLAG_BYTES:
                for matrix, head in zip(matrices, heads, strict=True):
                    scalars.setdefault(matrix, []).append(kept(head[1:]))
        return _Views(
            buffer,
            [Place(part.matrix, part.segment) for part in side.parts],
            [shared.keep(self._part(buffer, part)) for part in side.parts],
            [part_numbers(buffer, self.plan.matrices[part.matrix], part, way) for part in side.parts],
            presences,
            scalars,
        )

    def _owned(self, route: WaveRoute) -> list[Matrix]:
        return [self.plan.matrices[index] for group in route.owned for index in group.matrices]

    def _part(self, buffer: Tensor, part: Part) -> Tensor:
        segment = part.segment
        end = part.offset + segment.num_elements * self._dtype.itemsize
        return buffer[part.offset : end].view(self._dtype).view(segment.num_rows, segment.num_columns)

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


def _cut(matrix: Tensor, segment: Segment) -> Tensor:
    return matrix[
        segment.matrix_row : segment.matrix_row + segment.num_rows,
        segment.matrix_column : segment.matrix_column + segment.num_columns,
    ]
