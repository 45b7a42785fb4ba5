"""NorMuon: Muon whose rows are divided by the root of a second moment, one number a row.

With O the orthogonalised direction, m x n, and one second moment v_i a row, zero at first::

    v  <- beta2 v + (1 - beta2) mean over columns of O * O
    O^ <- O / (sqrt(v) + eps), row by row
    U  <- f O^ with f = 0.2 sqrt(m n) / |O^|   (the paper)
              or f = |O| / |O^|             (the published code, before its sqrt(max(1, m/n)))

Norms are Frobenius norms of the whole matrix. The second moment is sharded like the rows. It is
sent to the owner with the direction. The owner has all of O, so it makes the new moment (of whole
rows, though columns may be sharded) and f, and returns both with O. Shards divide their own rows.
So the result does not depend on the sharding.

Source: Z. Li et al., NorMuon (arXiv 2510.05491).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from omn_dist.algorithms.lists import batches
from omn_dist.exchange.numbers import Returned, StackNumbers
from omn_dist.optim.rules.muon import Muon, MuonSettings, muon_fields
from omn_dist.optim.rules.rule import LocalRegion, StateTensor, Tools
from omn_dist.optim.rules.values import check_at_least_zero, check_choice, check_fraction
from omn_dist.plan.geometry.matrix import Matrix, RowNumbers
from omn_dist.settings import unknown_name

SECOND_MOMENT = "row_second_moment"
"""State key: fp32, one number for each row of the operator."""

Rescale = Literal["0.2*sqrt(m*n)/|O^|", "|O|/|O^|"]
RESCALES: tuple[str, ...] = get_args(Rescale)

_SMALLEST_NORM = 1e-30
"""Keeps the factor of a zero update finite; the update stays zero."""


@dataclass(frozen=True, kw_only=True)
class NorMuonSettings(MuonSettings):
    """What a group on NorMuon says at one step."""

    row_beta: float
    row_eps: float
    rescale: Rescale


class NorMuon(Muon):
    """Muon with normalised rows."""

    name = "normuon"
    label = "NorMuon"
    fields = (*Muon.fields, "row_beta", "row_eps", "rescale")
    numbers = RowNumbers(to_owner=1, to_shards=1, scalars=1)

    @override
    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        check_choice(group, "rescale", RESCALES)
        check_at_least_zero(group, "row_eps")
        check_fraction(group, "row_beta")

    @override
    def state(self, group: Mapping[str, Any]) -> tuple[StateTensor, ...]:
        return (*super().state(group), StateTensor(SECOND_MOMENT, "rows"))

    @override
    def settings(self, group: Mapping[str, Any]) -> NorMuonSettings:
        own = {name: group[name] for name in ("row_beta", "row_eps", "rescale")}
        return NorMuonSettings(**muon_fields(group), **own)

    @override
    def prepare(
        self,
        regions: Sequence[LocalRegion],
        directions: Sequence[Tensor],
        numbers: Sequence[Tensor],
        tools: Tools,
        *,
        commit: bool,
    ) -> None:
        super().prepare(regions, directions, numbers, tools, commit=commit)
        torch._foreach_copy_([rows[0] for rows in numbers], [region.state[SECOND_MOMENT] for region in regions])

    @override
    def transform(
        self,
        matrices: Sequence[Matrix],
        directions: Tensor,
        settings: MuonSettings,
        numbers: Sequence[StackNumbers],
        tools: Tools,
    ) -> None:
        assert isinstance(settings, NorMuonSettings), "of this rule"
        super().transform(matrices, directions, settings, numbers, tools)
        # Of the updates in the communication dtype: shards normalise what it has rounded.
        for matrix, update, (received, returned) in zip(matrices, directions, numbers, strict=True):
            operator = update.T if matrix.transposed else update
            moment, factor = row_statistics(operator, received[0], settings)
            returned.rows[0].copy_(moment)
            returned.scalars[0].copy_(factor)

    @override
    def apply(self, regions: Sequence[LocalRegion], updates: Sequence[Tensor], returned: Sequence[Returned], tools: Tools) -> None:
        items = [
            (
                (self.move(region), region.settings.row_eps, region.matrix.transposed, update.shape),
                (region.parameter, update, numbers.rows[0], numbers.scalars[0]),
            )
            for region, update, numbers in zip(regions, updates, returned, strict=True)
        ]
        for ((kept, step_size, cautious), eps, transposed, _), (parameters, *lists) in batches(items):
            of_updates, moments, factors = (_stacked(tensors) for tensors in lists)
            moved_by = normalized(of_updates, moments, factors[:, None, None], eps, transposed=transposed)
            tools.kernels.apply_updates(parameters, list(moved_by.unbind()), kept, step_size, cautious=cautious)
        torch._foreach_copy_([region.state[SECOND_MOMENT] for region in regions], [numbers.rows[0] for numbers in returned])


def row_statistics(update: Tensor, second_moment: Tensor, settings: NorMuonSettings) -> tuple[Tensor, Tensor]:
    """The new second moment and the factor f of a whole matrix. At its owner, not collective.

    Args:
        update: ``[rows, columns]``, as the shards will get it; any floating dtype and strides.
        second_moment: ``[rows]``, fp32, of the last step.
        settings: of the matrix's group.

    Returns:
        The new moment ``[rows]`` in fp32, and f as an fp32 scalar, summed in fp64. The arguments do
        not change.
    """
    num_rows, num_columns = update.shape
    squares = torch.linalg.vector_norm(update, dim=1, dtype=torch.float32).square_()
    moment = second_moment.lerp(squares / num_columns, 1 - settings.row_beta)
    denominators = moment.sqrt().add_(settings.row_eps).double()
    squares = squares.double()
    norm = (squares / denominators.square()).sum().sqrt().clamp_(min=_SMALLEST_NORM)
    if settings.rescale == "0.2*sqrt(m*n)/|O^|":
        return moment, (0.2 * math.sqrt(num_rows * num_columns) / norm).float()
    if settings.rescale == "|O|/|O^|":
        return moment, (squares.sum().sqrt() / norm).float()
    raise ValueError(unknown_name("rescale", settings.rescale, RESCALES))


def normalized(updates: Tensor, new_second_moment: Tensor, factor: Tensor, eps: float, *, transposed: bool) -> Tensor:
    """Updates O of regions, normalised and rescaled: ``f O / (sqrt(v) + eps)``.

    Elementwise, in fp32.

    Args:
        updates: ``[..., stored rows, stored columns]``, in front any number of regions.
        new_second_moment: ``[..., rows of the operator]``, fp32.
        factor: f, broadcast to ``updates``.
        eps: ``row_eps`` of the group.
        transposed: whether the operator's rows are stored as columns.
    """
    denominators = new_second_moment.sqrt().add_(eps)
    return (updates.float() / (denominators[..., None, :] if transposed else denominators[..., None])).mul_(factor)


def _stacked(tensors: list[Tensor]) -> Tensor:
    """``[tensors, ...]``; no copy of a single one."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)
