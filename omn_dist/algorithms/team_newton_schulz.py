"""Newton-Schulz of one matrix on a team of t ranks, each with a slice of the long side.

With ``X = [X_1 ... X_t]`` the Gram matrix ``A = X X^T`` is the sum of all ``X_i X_i^T``, and the
step ``X <- a X + P X`` can be taken slice by slice. In each step a member computes:

1. the Gram matrix of its slice, and its row block of the sum over the team, which it adds in the
   order of the members (``exchange``);
2. the whole Gram matrix from all row blocks (``gather``), and its row block of ``P = b A + c A A``;
3. the whole polynomial P from all row blocks (``gather``), and its slice of ``a X + P X``.

So a member does 1/t of the work. One member computes each entry of A and P and sends it to the
others, so all have the same bits. The result depends only on the matrix and how it is cut; it
rounds differently from one rank's.
"""

from typing import Protocol

import torch
from torch import Tensor

from omn_dist.algorithms.iteration import ITERATES
from omn_dist.algorithms.newton_schulz import Recipe
from omn_dist.algorithms.scratch import Scratch


class Team(Protocol):
    """The collectives of a team. All members make the same calls in the same order.

    The next call of a method may overwrite what its last call returned.
    """

    size: int
    """Number of members t."""

    def exchange(self, blocks: Tensor) -> Tensor:
        """Send block j of ``[t, ...]`` to member j; return those for this member: ``[t, ...]``."""
        ...

    def gather(self, block: Tensor) -> Tensor:
        """Send ``[...]`` to all; return the blocks of all members in their order, ``[t, ...]``."""
        ...


def orthogonalize_slice(direction: Tensor, recipe: Recipe, team: Team, scratch: Scratch) -> Tensor:
    """A member's slice of the orthogonalised matrix.

    See :func:`~omn_dist.algorithms.newton_schulz.orthogonalize`.

    Args:
        direction: ``[short side, width of the slice]``, any floating dtype and strides; not
            changed.
        recipe: in the standard form; the same for all members.
        team: the members, in the order of their slices.
        scratch: working memory.

    Returns:
        The shape of ``direction``, in the dtype of the iteration and in working memory. Zero gives
        zero.

    Collective in the team: a gather of two numbers, then three collectives a step (two where the
    schedule is cubic).
    """
    iterate = _normalized(direction, recipe, team)
    short, dtype, device = len(iterate), iterate.dtype, iterate.device
    block_rows = -(-short // team.size)
    iterates = [scratch.take(name, iterate.shape, dtype, device) for name in ITERATES]
    block = scratch.take("polynomial", (block_rows, short), dtype, device)
    # The last block may have fewer rows: rows of zeros, which stay zero, fill it up.
    padded = scratch.take("gram", (team.size * block_rows, short), dtype, device)
    padded[short:] = 0
    for step, (a, b, c) in enumerate(recipe.schedule.coefficients):
        torch.mm(iterate, iterate.mT, out=padded[:short])
        part = _sum(team.exchange(padded.view(team.size, block_rows, short)))
        factor, alpha = team.gather(part).view(-1, short)[:short], b
        if not recipe.schedule.is_cubic:
            torch.addmm(part, part, factor, beta=b, alpha=c, out=block)
            factor, alpha = team.gather(block).view(-1, short)[:short], 1
        iterate = torch.addmm(iterate, factor, iterate, beta=a, alpha=alpha, out=iterates[step % 2])
    return iterate


def _normalized(direction: Tensor, recipe: Recipe, team: Team) -> Tensor:
    """A copy in the dtype of the iteration, divided as the recipe divides the whole matrix."""
    iterate = direction.to(recipe.input_dtype, copy=True).to(recipe.normalization_dtype)
    numbers = torch.stack((iterate.abs().amax().double(), torch.linalg.vector_norm(iterate, dtype=torch.float64)))
    largest, norm = team.gather(numbers).unbind(dim=1)
    # In fp64 the sum of squares needs no scale.
    scale, whole_norm = largest.amax(), torch.linalg.vector_norm(norm)
    if recipe.max_abs_floor is not None:
        scale = scale.clamp(min=recipe.max_abs_floor) if recipe.max_abs_floor else torch.where(scale == 0, 1, scale)
        iterate.div_(scale.to(iterate.dtype))
        whole_norm = whole_norm / scale
    whole_norm = whole_norm.to(iterate.dtype)
    iterate.div_(whole_norm + recipe.norm_floor if recipe.norm_guard == "add" else whole_norm.clamp(min=recipe.norm_floor))
    return iterate.to(recipe.dtype)


def _sum(parts: Tensor) -> Tensor:
    """Add ``[t, ...]``, t > 1, in fp32 from the first to the last, and round once: ``[...]``."""
    total = parts[0].float() + parts[1]
    for part in parts[2:]:
        total += part
    return total.to(parts.dtype)
