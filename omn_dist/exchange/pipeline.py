"""The pipeline of waves: gather(i + 1) and scatter(i - 1) are in flight while wave i is orthogonalised."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from omn_dist.exchange.route import Part, wave_route
from omn_dist.exchange.transport import Pending, Traffic, make_transport
from omn_dist.plan.layout import Segment
from omn_dist.plan.ownership import Plan


class MatrixWork(Protocol):
    """What the pipeline asks of an algorithm. Matrices are named by their index in the plan."""

    def has_gradient(self, matrix: int) -> bool:
        """Whether this rank has a gradient for the parameter of the matrix."""
        ...

    def prepare(self, matrix: int, segment: Segment) -> Tensor:
        """The direction of a local rectangle; a missing gradient counts as zeros."""
        ...

    def transform(self, matrix: int, direction: Tensor) -> Tensor:
        """The update of a whole matrix."""
        ...

    def apply(self, matrix: int, segment: Segment, update: Tensor, present: Tensor | None) -> None:
        """Commit a local rectangle.

        ``present`` is None where this rank has a gradient itself, else a scalar: 1 where some rank has one, 0 where none has and
        nothing may change.
        """
        ...


@dataclass
class _Slot:
    shard_side: Tensor
    owner_side: Tensor


class Pipeline:
    """Executes one plan on one rank. Buffers are allocated once: two slots (gather, scatter) and the stack of whole matrices."""

    def __init__(self, plan: Plan, rank: int, group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype) -> None:
        self.plan = plan
        self._routes = [wave_route(plan, rank, wave) for wave in plan.waves]
        self._transport = make_transport(plan, self._routes, rank, group, device, dtype)
        shard_side = max((route.shard_side.num_elements for route in self._routes), default=0)
        owner_side = max((route.owner_side.num_elements for route in self._routes), default=0)
        stack = max((route.num_stack_elements for route in self._routes), default=0)

        def slot() -> _Slot:
            return _Slot(torch.zeros(shard_side, device=device, dtype=dtype), torch.zeros(owner_side, device=device, dtype=dtype))

        self._gather_slot, self._scatter_slot = slot(), slot()
        self._stack = torch.zeros(stack, device=device, dtype=dtype)
        self._one, self._zero = torch.ones((), device=device, dtype=dtype), torch.zeros((), device=device, dtype=dtype)

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent since construction."""
        return self._transport.traffic

    def run(self, work: MatrixWork, beside_first_gather: Callable[[], None]) -> None:
        """One step of all waves. Collective: all ranks of the plan call it, with whatever gradients they have.

        ``beside_first_gather`` is called once, while the first gather is in flight.
        """
        if not self._routes:
            beside_first_gather()
            return
        gathering = self._launch_gather(0, work)
        beside_first_gather()
        scattering: Pending | None = None
        for number in range(len(self._routes)):
            gathering.wait()
            present = self._unpack(number, work)
            if number + 1 < len(self._routes):
                gathering = self._launch_gather(number + 1, work)
            self._transform(number, work)
            if scattering is not None:
                scattering.wait()
                self._apply(number - 1, work)
            scattering = self._launch_scatter(number, present)
            self._apply_own(number, work, present)
        assert scattering is not None
        scattering.wait()
        self._apply(len(self._routes) - 1, work)

    def _launch_gather(self, number: int, work: MatrixWork) -> Pending:
        route, slot = self._routes[number], self._gather_slot
        shard_side = slot.shard_side[: route.shard_side.num_elements]
        owner_side = slot.owner_side[: route.owner_side.num_elements]
        with record_function(f"omn_dist::gather({number})"):
            if route.is_gathered:
                for matrix, offset in route.shard_side.flags:
                    shard_side[offset].fill_(work.has_gradient(matrix))
                for part in route.shard_side.parts:
                    _view(shard_side, part).copy_(work.prepare(part.matrix, part.segment))
            return self._transport.gather(number, shard_side, owner_side)

    def _unpack(self, number: int, work: MatrixWork) -> dict[int, Tensor]:
        """Whole directions into the stack; returns for each owned matrix whether any rank has a gradient (a scalar)."""
        route, owner_side = self._routes[number], self._gather_slot.owner_side
        with record_function(f"omn_dist::unpack({number})"):
            matrices = self._stacked(number)
            for part in route.owner_side.parts if route.is_gathered else ():
                _cut(matrices[part.matrix], part.segment).copy_(_view(owner_side, part))
            for matrix, segment in route.own:
                _cut(matrices[matrix], segment).copy_(work.prepare(matrix, segment))
            flags: dict[int, list[Tensor]] = {}
            for matrix, offset in route.owner_side.flags:
                flags.setdefault(matrix, []).append(owner_side[offset])
            return {matrix: self._any_gradient(work, matrix, flags.get(matrix, [])) for matrix, _ in route.owned}

    def _any_gradient(self, work: MatrixWork, matrix: int, flags: list[Tensor]) -> Tensor:
        """One where this rank or one of those that sent ``flags`` has a gradient, else zero; on the device, never read here."""
        if work.has_gradient(matrix):
            return self._one
        return torch.stack(flags).amax() if flags else self._zero

    def _transform(self, number: int, work: MatrixWork) -> None:
        with record_function(f"omn_dist::orthogonalize({number})"):
            for matrix, direction in self._stacked(number).items():
                direction.copy_(work.transform(matrix, direction))

    def _launch_scatter(self, number: int, present: dict[int, Tensor]) -> Pending:
        route, slot = self._routes[number], self._scatter_slot
        shard_side = slot.shard_side[: route.shard_side.num_elements]
        owner_side = slot.owner_side[: route.owner_side.num_elements]
        with record_function(f"omn_dist::scatter({number})"):
            matrices = self._stacked(number)
            for matrix, offset in route.owner_side.flags:
                owner_side[offset].copy_(present[matrix])
            for part in route.owner_side.parts:
                _view(owner_side, part).copy_(_cut(matrices[part.matrix], part.segment))
            return self._transport.scatter(number, owner_side, shard_side)

    def _apply(self, number: int, work: MatrixWork) -> None:
        """Commit the parts of wave ``number`` that other ranks own."""
        route, shard_side = self._routes[number], self._scatter_slot.shard_side
        with record_function(f"omn_dist::apply({number})"):
            present = {matrix: shard_side[offset] for matrix, offset in route.shard_side.flags}
            for part in route.shard_side.parts:
                self._commit(work, part.matrix, part.segment, _view(shard_side, part), present.get(part.matrix))

    def _apply_own(self, number: int, work: MatrixWork, present: dict[int, Tensor]) -> None:
        matrices = self._stacked(number)
        with record_function(f"omn_dist::apply_own({number})"):
            for matrix, segment in self._routes[number].own:
                self._commit(work, matrix, segment, _cut(matrices[matrix], segment), present[matrix])

    @staticmethod
    def _commit(work: MatrixWork, matrix: int, segment: Segment, update: Tensor, present: Tensor | None) -> None:
        if work.has_gradient(matrix):
            work.apply(matrix, segment, update, None)
        elif present is not None:
            work.apply(matrix, segment, update, present)

    def _stacked(self, number: int) -> dict[int, Tensor]:
        """The whole matrices of the wave that this rank owns, as views of the stack."""
        return {
            index: self._stack[offset : offset + self.plan.matrices[index].num_elements].view(
                self.plan.matrices[index].num_rows, self.plan.matrices[index].num_columns
            )
            for index, offset in self._routes[number].owned
        }


def _view(buffer: Tensor, part: Part) -> Tensor:
    segment = part.segment
    return buffer[part.offset : part.offset + segment.num_elements].view(segment.num_rows, segment.num_columns)


def _cut(matrix: Tensor, segment: Segment) -> Tensor:
    return matrix[
        segment.matrix_row : segment.matrix_row + segment.num_rows,
        segment.matrix_column : segment.matrix_column + segment.num_columns,
    ]
