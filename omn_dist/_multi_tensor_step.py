"""One step's view of the matrices where every operation is a kernel launch: the rectangles of a wave go together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from omn_dist._domains import Domain
from omn_dist._step import Gradients, MatrixStep, changed_by_apply, rectangle
from omn_dist.algorithms import multi_tensor, muon, normuon
from omn_dist.algorithms.multi_tensor import batches
from omn_dist.algorithms.normuon import NorMuonSettings
from omn_dist.exchange.numbers import Copies, Returned
from omn_dist.exchange.pipeline import Place

_Move = tuple[float, float, bool]
"""What an update does to a parameter: the part kept, the size of the step, and whether decay is cautious."""


def matrix_step(
    domain: Domain, state: Mapping[Tensor, Mapping[str, Any]], gradients: Gradients, *, deterministic: bool
) -> MatrixStep:
    """What the pipeline of a domain works with at one step, in the way that suits its device."""
    kind = MultiTensorStep if multi_tensor.uses_multi_tensor(domain.pipeline.device) else MatrixStep
    return kind(domain, state, gradients, deterministic=deterministic)


class MultiTensorStep(MatrixStep):
    """:class:`MatrixStep` with a number of calls on shards that grows with the distinct settings of a wave, not its matrices.

    Momentum, rate times shape factor, decay and dtypes count as settings, and NorMuon's normalisation goes by shapes too. Bits are
    those of :class:`MatrixStep`.
    """

    def __init__(
        self, domain: Domain, state: Mapping[Tensor, Mapping[str, Any]], gradients: Gradients, *, deterministic: bool
    ) -> None:
        super().__init__(domain, state, gradients, deterministic=deterministic)
        self._zeros: dict[torch.dtype, Tensor] = {}

    def prepare(self, places: Sequence[Place], directions: Sequence[Tensor], numbers: Sequence[Tensor], *, commit: bool) -> None:
        rectangles = []
        row_moments = Copies([], [])
        for place, target, rows in zip(places, directions, numbers, strict=True):
            shard = self._shard(place.matrix)
            settings = shard.settings
            key = settings.momentum, settings.momentum_rule, settings.nesterov, commit and self._commits_early(place)
            rectangles.append((key, (*self._gradient_and_momentum(place), target)))
            if shard.row_moment is not None:
                row_moments.add(rows[0], shard.row_moment.rows(place.segment))
        for (coefficient, rule, nesterov, commits), (gradients, momenta, targets) in batches(rectangles):
            multi_tensor.prepare(gradients, momenta, targets, coefficient, rule, nesterov, commit=commits)
        row_moments.run()

    def commit(self, places: Sequence[Place]) -> None:
        self._commit_all([place for place in places if self._commits_early(place)])

    def _commit_all(self, places: Sequence[Place]) -> None:
        rectangles = []
        for place in places:
            settings = self._shard(place.matrix).settings
            rectangles.append(((settings.momentum, settings.momentum_rule), self._gradient_and_momentum(place)))
        for (coefficient, rule), (gradients, momenta) in batches(rectangles):
            multi_tensor.update_momenta(gradients, momenta, coefficient, rule)

    def _gradient_and_momentum(self, place: Place) -> tuple[Tensor, Tensor]:
        """Of a rectangle. All that are missing are views of the same zeros, which nothing writes to."""
        shard = self._shard(place.matrix)
        momentum = rectangle(shard.momentum, place.segment)
        if shard.gradient is not None:
            return rectangle(shard.gradient, place.segment), momentum
        zeros = self._zeros.get(momentum.dtype)
        if zeros is None or zeros.numel() < momentum.numel():
            zeros = self._zeros[momentum.dtype] = momentum.new_zeros(momentum.numel())
        return zeros[: momentum.numel()].view(momentum.shape), momentum

    def apply(
        self,
        places: Sequence[Place],
        updates: Sequence[Tensor],
        present: Sequence[Tensor | None],
        returned: Sequence[Returned],
    ) -> None:
        uncertain = [(place, flag) for place, flag in zip(places, present, strict=True) if flag is not None]
        changed = [
            ((), (tensor, flag)) for place, flag in uncertain for tensor in changed_by_apply(self._shard(place.matrix), place)
        ]
        before = [(tensors, flags, multi_tensor.in_a_row(tensors)) for _, (tensors, flags) in batches(changed)]
        self._commit_all([place for place in places if not self._commits_early(place)])
        for (kept, step_size, cautious), (parameters, of_updates) in batches(self._moves(places, updates, returned)):
            multi_tensor.apply(parameters, of_updates, kept, step_size, cautious=cautious)
        for tensors, flags, old in before:
            multi_tensor.restore_absent(tensors, flags, old)
        if uncertain:
            self._presences.append(torch.stack([flag for _, flag in uncertain]).amax())
        shards = [(self._shard(place.matrix), place.segment) for place in places]
        followers = [
            ((), (rectangle(shard.rounded, segment), rectangle(shard.parameter, segment)))
            for shard, segment in shards
            if shard.rounded is not None
        ]
        for _, (rounded, masters) in batches(followers):
            torch._foreach_copy_(rounded, masters)

    def _moves(
        self, places: Sequence[Place], updates: Sequence[Tensor], returned: Sequence[Returned]
    ) -> Iterator[tuple[_Move, tuple[Tensor, Tensor]]]:
        """How each parameter moves, with its update: as it came, or under NorMuon normalised, with row moments committed."""
        to_normalize = []
        row_moments = Copies([], [])
        for place, update, numbers in zip(places, updates, returned, strict=True):
            shard, whole = self._shard(place.matrix), self._plan.matrices[place.matrix]
            parameter, settings = rectangle(shard.parameter, place.segment), shard.settings
            move = (*muon.move(settings, *whole.operator_shape), settings.cautious_decay)
            if isinstance(settings, NorMuonSettings):
                assert shard.row_moment is not None, "NorMuon has one of every parameter"
                row_moments.add(shard.row_moment.rows(place.segment), numbers.rows[0])
                key = move, settings.row_epsilon, whole.transposed, update.shape
                to_normalize.append((key, (parameter, update, numbers.rows[0], numbers.scalars[0])))
            else:
                yield move, (parameter, update)
        for (move, row_epsilon, transposed, _), (parameters, of_updates, rows, factors) in batches(to_normalize):
            normalized = normuon.normalized(
                torch.stack(of_updates), torch.stack(rows), torch.stack(factors)[:, None, None], row_epsilon, transposed=transposed
            )
            for parameter, update in zip(parameters, normalized.unbind(), strict=True):
                yield move, (parameter, update)
        row_moments.run()
