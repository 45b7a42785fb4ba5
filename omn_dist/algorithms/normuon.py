"""NorMuon: Muon whose rows are normalised by a second moment, one number a row; exact whatever the sharding.

With O the orthogonalised direction, m x n, and one row moment v_i a row, zero at first::

    v  <- beta2 v + (1 - beta2) mean over columns of O * O
    O^ <- O / (sqrt(v) + eps), row by row
    U  <- f O^ with f = 0.2 sqrt(m n) / |O^|   (the paper)
              or f = |O| / |O^|             (the published code, before its factor sqrt(max(1, m/n)))

Norms are Frobenius norms of the whole matrix. The row moment is sharded like the rows and travels to the owner with the
direction; the owner has all of O, so it makes the new moment (whole rows, though columns may be sharded) and f, which ride back
with O. Shards divide their own rows.

Source: Z. Li et al., NorMuon (arXiv 2510.05491).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from omn_dist.algorithms import muon
from omn_dist.algorithms.muon import MuonSettings
from omn_dist.settings import unknown_name

Rescale = Literal["0.2*sqrt(m*n)/|O^|", "|O|/|O^|"]
RESCALES: tuple[str, ...] = get_args(Rescale)

_SMALLEST_NORM = 1e-30
"""Keeps the factor of a zero update finite; the update stays zero."""


@dataclass(frozen=True, kw_only=True)
class NorMuonSettings(MuonSettings):
    """What one group says of its matrices at this step."""

    row_beta: float
    row_epsilon: float
    rescale: Rescale


def row_statistics(update: Tensor, row_moment: Tensor, settings: NorMuonSettings) -> tuple[Tensor, Tensor]:
    """The new row moment and the factor f of a whole matrix. At its owner, not collective.

    Args:
        update: ``[rows, columns]``, as the shards will get it; any floating dtype and strides.
        row_moment: ``[rows]``, fp32, of the last step.
        settings: of the matrix's group.

    Returns:
        The new moment ``[rows]`` in fp32, and f as an fp32 scalar, summed in fp64. Nothing is changed.
    """
    num_rows, num_columns = update.shape
    squares = torch.linalg.vector_norm(update, dim=1, dtype=torch.float32).square_()
    moment = row_moment.lerp(squares / num_columns, 1 - settings.row_beta)
    denominators = moment.sqrt().add_(settings.row_epsilon).double()
    squares = squares.double()
    norm = (squares / denominators.square()).sum().sqrt().clamp_(min=_SMALLEST_NORM)
    if settings.rescale == "0.2*sqrt(m*n)/|O^|":
        return moment, (0.2 * math.sqrt(num_rows * num_columns) / norm).float()
    if settings.rescale == "|O|/|O^|":
        return moment, (squares.sum().sqrt() / norm).float()
    raise ValueError(unknown_name("rescale", settings.rescale, RESCALES))


def apply(
    parameter: Tensor,
    row_moment: Tensor,
    update: Tensor,
    new_row_moment: Tensor,
    factor: Tensor,
    settings: NorMuonSettings,
    *,
    num_rows: int,
    num_columns: int,
    transposed: bool,
) -> None:
    """Move a rectangle of a parameter by its part of the update, and commit its row moment, in place.

    Args:
        parameter, update: of one shape, as stored.
        row_moment, new_row_moment: ``[rows of the operator in the rectangle]``, fp32.
        factor: scalar f of the whole matrix.
        settings: of the matrix's group.
        num_rows, num_columns: the shape of the whole matrix, for the scale.
        transposed: whether the operator's rows are stored as columns.
    """
    moved_by = normalized(update, new_row_moment, factor, settings.row_epsilon, transposed=transposed)
    muon.apply(parameter, moved_by, settings, num_rows=num_rows, num_columns=num_columns)
    row_moment.copy_(new_row_moment)


def normalized(update: Tensor, new_row_moment: Tensor, factor: Tensor, row_epsilon: float, *, transposed: bool) -> Tensor:
    """The update O of a rectangle, normalised and rescaled, in fp32: ``f O / (sqrt(v) + eps)``. Elementwise.

    Args:
        update: ``[..., stored rows, stored columns]``, in front of them any number of rectangles.
        new_row_moment: ``[..., rows of the operator]``, fp32.
        factor: f, broadcast to ``update``.
        row_epsilon: of the group.
        transposed: whether the operator's rows are stored as columns.
    """
    denominators = new_row_moment.sqrt().add_(row_epsilon)
    return (update.float() / (denominators[..., None, :] if transposed else denominators[..., None])).mul_(factor)
