"""Newton-Schulz orthogonalisation of one whole matrix, in the two numeric recipes that people train with."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from omn_dist.algorithms.coefficients import QUINTIC, Schedule
from omn_dist.settings import unknown_name

RecipeName = Literal["omn", "torch"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the numbers of one Newton-Schulz call are made: schedule, dtype and guards of the normalisation."""

    name: str
    schedule: Schedule
    dtype: torch.dtype
    """The dtype of the iteration. The direction is cast to it before it is normalised, so it is also the dtype that the
    wire needs to lose nothing."""
    max_abs_floor: float | None
    """Divide by the largest absolute element first, clamped from below at this value; ``None`` leaves that out."""
    norm_floor: float
    """Guard of the Frobenius norm, see ``norm_guard``."""
    norm_guard: Literal["add", "clamp"]
    """``add``: divide by ``norm + norm_floor``. ``clamp``: divide by ``max(norm, norm_floor)``."""
    restore_dtype: bool
    """Whether the result comes back in the dtype of the direction, or in ``dtype``."""


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "omn": Recipe(
            name="omn",
            schedule=QUINTIC,
            dtype=torch.float32,
            max_abs_floor=1e-7,
            norm_floor=1e-7,
            norm_guard="add",
            restore_dtype=True,
        ),
        "torch": Recipe(
            name="torch",
            schedule=QUINTIC,
            dtype=torch.bfloat16,
            max_abs_floor=None,
            norm_floor=1e-7,
            norm_guard="clamp",
            restore_dtype=False,
        ),
    }
)


def recipe_by_name(name: str) -> Recipe:
    """The recipe called ``name``; a ``ValueError`` suggests the nearest name."""
    if name not in RECIPES:
        raise ValueError(unknown_name("Newton-Schulz recipe", name, RECIPES))
    return RECIPES[name]


def orthogonalize(direction: Tensor, recipe: RecipeName | Recipe = "omn") -> Tensor:
    """Push all singular values of whole matrices towards one.

    ``recipe="torch"`` gives the bits of ``torch.optim.Muon``; ``"omn"`` iterates in fp32 after a division by the largest
    absolute element (clamped at 1e-7) and by the Frobenius norm. The result is a finite polynomial in the direction: with
    the quintic schedule singular values land between about 0.5 and 1.2, not at one.

    Args:
        direction: ``[rows, columns]``, or ``[batch, rows, columns]`` for one batched call; any floating dtype, whole (never a
            shard). Not changed.
        recipe: a name of ``RECIPES`` or a recipe of your own.

    Returns:
        The shape of ``direction``; for ``omn`` in its dtype, for ``torch`` in bf16. A batched call may differ in the last
        bits from calls on its matrices.

    Raises:
        ValueError: neither a matrix nor a batch, or an unknown recipe.

    Not collective. Source of the iteration: K. Jordan et al., Muon (2024).
    """
    if isinstance(recipe, str):
        recipe = recipe_by_name(recipe)
    if direction.ndim not in (2, 3):
        raise ValueError(f"orthogonalize: found a tensor of shape {tuple(direction.shape)}, expected a matrix or a batch of them")
    if direction.ndim == 3 and not len(direction):
        return direction.to(direction.dtype if recipe.restore_dtype else recipe.dtype)
    iterate = direction.to(recipe.dtype, copy=True)
    if recipe.max_abs_floor is not None and iterate.numel():
        iterate.div_(iterate.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=recipe.max_abs_floor))
    tall = direction.size(-2) > direction.size(-1)
    if tall:
        iterate = iterate.mT
    norm = iterate.norm() if iterate.ndim == 2 else torch.linalg.vector_norm(iterate, dim=(-2, -1), keepdim=True)
    iterate.div_(norm + recipe.norm_floor if recipe.norm_guard == "add" else norm.clamp(min=recipe.norm_floor))
    product = torch.addmm if iterate.ndim == 2 else torch.baddbmm
    for a, b, c in recipe.schedule.coefficients:
        gram = iterate @ iterate.mT
        polynomial = product(gram, gram, gram, beta=b, alpha=c)
        iterate = product(iterate, polynomial, iterate, beta=a)
    if tall:
        iterate = iterate.mT
    return iterate.to(direction.dtype) if recipe.restore_dtype else iterate
