"""Newton-Schulz orthogonalisation of whole matrices.

Two recipes are published ones, to the bit. The third works the same at every scale of its input.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from omn_dist.algorithms.coefficients import QUINTIC, Coefficients, Schedule, make_schedule
from omn_dist.algorithms.iteration import ITERATES, TORCH_ITERATION, FormChoice, IterationKernels, chosen_form, gram_form
from omn_dist.algorithms.scratch import Scratch
from omn_dist.algorithms.switches import default_products
from omn_dist.settings import SettingsError, unknown_name

RecipeName = Literal["omn", "torch", "scaled"]
DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({name: getattr(torch, name) for name in get_args(DtypeName)})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The numerics of one Newton-Schulz call.

    Raises:
        SettingsError: an unknown form, or the Gram form in half precision, see ``form``.
    """

    name: str
    schedule: Schedule
    input_dtype: torch.dtype
    """The direction is cast to it before anything else.

    So a direction that is sent in this dtype loses nothing.
    """
    normalization_dtype: torch.dtype
    """The dtype of the division by the norm; norms accumulate in fp32 at least."""
    dtype: torch.dtype
    """The dtype of the iteration."""
    max_abs_floor: float | None
    """Guard of a division by the largest absolute element, which comes before that by the norm.

    The divisor is at least this value. 0: the division is exact, and zero stays zero. ``None``:
    there is no such division.
    """
    norm_floor: float
    """Guard of the Frobenius norm, see ``norm_guard``."""
    norm_guard: Literal["add", "clamp"]
    """``add``: divide by ``norm + norm_floor``. ``clamp``: divide by ``max(norm, norm_floor)``."""
    restore_dtype: bool
    """Whether the result comes back in the dtype of the direction, or in ``dtype``."""
    form: FormChoice = "standard"
    """``standard``; ``gram``, which iterates on the short side's Gram matrix; or ``auto``, which
    takes the one with fewer FLOPs for the shape.

    The Gram form is for fp32 only. It squares the condition number, and in half precision its
    rounding makes negative eigenvalues, which grow by the square of each slope.
    """

    def __post_init__(self) -> None:
        if self.form not in get_args(FormChoice):
            raise SettingsError(unknown_name("form", self.form, get_args(FormChoice)))
        if self.form in ("gram", "auto") and self.dtype != torch.float32:
            raise SettingsError(
                f"form: found {self.form!r} with an iteration in {self.dtype}, expected 'standard'; the Gram form needs float32"
            )


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "omn": Recipe(
            name="omn",
            schedule=QUINTIC,
            input_dtype=torch.float32,
            normalization_dtype=torch.float32,
            dtype=torch.float32,
            max_abs_floor=1e-7,
            norm_floor=1e-7,
            norm_guard="add",
            restore_dtype=True,
        ),
        "torch": Recipe(
            name="torch",
            schedule=QUINTIC,
            input_dtype=torch.bfloat16,
            normalization_dtype=torch.bfloat16,
            dtype=torch.bfloat16,
            max_abs_floor=None,
            norm_floor=1e-7,
            norm_guard="clamp",
            restore_dtype=False,
        ),
        # After the exact division by the largest element the norm is at least one, or the matrix is
        # zero: a floor of one changes no other matrix.
        "scaled": Recipe(
            name="scaled",
            schedule=QUINTIC,
            input_dtype=torch.bfloat16,
            normalization_dtype=torch.float32,
            dtype=torch.bfloat16,
            max_abs_floor=0.0,
            norm_floor=1.0,
            norm_guard="clamp",
            restore_dtype=True,
        ),
    }
)


def recipe_by_name(name: str) -> Recipe:
    """The recipe called ``name``; a ``SettingsError`` suggests the nearest name."""
    if name not in RECIPES:
        raise SettingsError(unknown_name("Newton-Schulz recipe", name, RECIPES))
    return RECIPES[name]


@lru_cache(maxsize=256)
def build_recipe(
    name: str,
    schedule: str | tuple[Coefficients, ...] | None = None,
    ns_steps: int | None = None,
    dtype: str | None = None,
    form: FormChoice = "standard",
) -> Recipe:
    """The recipe ``name``, with other parts where they are given.

    Args:
        name: a name of ``RECIPES``.
        schedule, ns_steps: as in :func:`~omn_dist.algorithms.coefficients.make_schedule`.
        dtype: another dtype of the iteration, by its name. Then the direction is cast to bf16 first
            exactly when the iteration is in bf16, and the normalisation is done in fp32.
        form: of the iteration.

    Raises:
        SettingsError: an unknown name, or parts that do not go together.
    """
    recipe = recipe_by_name(name)
    if schedule is not None or ns_steps is not None:
        recipe = replace(recipe, schedule=make_schedule(recipe.schedule if schedule is None else schedule, ns_steps))
    if dtype is not None:
        if dtype not in DTYPES:
            raise SettingsError(unknown_name("Newton-Schulz dtype", dtype, DTYPES))
        if DTYPES[dtype] != recipe.dtype:
            recipe = replace(
                recipe,
                dtype=DTYPES[dtype],
                input_dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32,
                normalization_dtype=torch.float32,
            )
    return replace(recipe, form=form)


def group_recipe(group: Mapping[str, Any]) -> Recipe:
    """The recipe that the fields of a parameter group ask for; see :func:`build_recipe`."""
    schedule = group["schedule"]
    if schedule is not None and not isinstance(schedule, str):
        schedule = tuple(tuple(triple) for triple in schedule)
    return build_recipe(group["newton_schulz"], schedule, group["ns_steps"], group["ns_dtype"], group["form"])


@torch.no_grad()
def orthogonalize(direction: Tensor, recipe: RecipeName | Recipe = "omn") -> Tensor:
    """Push all singular values of whole matrices towards one.

    The result is a polynomial of the direction. With the quintic schedule singular values land
    between about 0.5 and 1.2, not at one. The recipes:

    - ``"torch"`` gives the bits of ``torch.optim.Muon``;
    - ``"omn"`` iterates in fp32, after a division by the largest absolute element (clamped at 1e-7)
      and one by the Frobenius norm;
    - ``"scaled"`` iterates in bf16, after an exact division by the largest element and one by the
      norm in fp32. Every scale of the input gives the result of scale 1.

    Args:
        direction: ``[rows, columns]``, or ``[batch, rows, columns]`` for one batched call; any
            floating dtype, whole (never a shard). Not changed.
        recipe: a name of ``RECIPES``, or a recipe such as :func:`build_recipe` gives.

    Returns:
        The shape of ``direction``, in its dtype; for ``torch`` in the dtype of the iteration. Zero
        gives zero. A batched call may differ in the last bits from calls on its matrices. Carries
        no gradient.

    Raises:
        ValueError: neither a matrix nor a batch, or an unknown recipe.

    Not collective. Source of the iteration: K. Jordan et al., Muon (2024).
    """
    if isinstance(recipe, str):
        recipe = recipe_by_name(recipe)
    if direction.ndim not in (2, 3):
        raise ValueError(f"orthogonalize: found a tensor of shape {tuple(direction.shape)}, expected a matrix or a batch of them")
    dtype = direction.dtype if recipe.restore_dtype else recipe.dtype
    out = torch.empty(direction.shape, dtype=dtype, device=direction.device)
    if direction.numel():
        with torch.autocast(direction.device.type, enabled=False), default_products:
            orthogonalize_into(out, direction, recipe, Scratch())
    return out


def orthogonalize_into(
    out: Tensor, direction: Tensor, recipe: Recipe, scratch: Scratch, kernels: IterationKernels = TORCH_ITERATION
) -> None:
    """:func:`orthogonalize` in memory that is there already.

    Args:
        out: where the result goes; may be ``direction`` itself.
        direction, recipe: as in :func:`orthogonalize`.
        scratch: working memory.
        kernels: what runs the standard form.

    Not collective.
    """
    tall = direction.size(-2) > direction.size(-1)
    # Where the result has other strides or another dtype, nothing on the way to it can be there.
    direct = out.dtype == recipe.dtype and out.is_contiguous()
    if tall and direct:
        iterate = out
    else:
        iterate = scratch.take("transposed" if tall else ITERATES[0], direction.shape, recipe.dtype, direction.device)
    _normalize_into(iterate, direction, recipe, tall)
    if tall:
        iterate = iterate.mT
    if chosen_form(recipe.form, recipe.schedule, *iterate.shape[-2:]) == "gram":
        result = gram_form(iterate, recipe.schedule)
    else:
        # The last product can write where the result belongs.
        result = kernels.newton_schulz(iterate, recipe.schedule, scratch, out if direct and not tall else None)
    if tall:
        kernels.copy_transposed(out, result)
    elif result is not out:
        out.copy_(result)


def _normalize_into(iterate: Tensor, direction: Tensor, recipe: Recipe, tall: bool) -> None:
    """Write the direction with a Frobenius norm of at most one, in the dtype of the iteration."""
    precise = direction.to(recipe.input_dtype).to(recipe.normalization_dtype)
    if recipe.max_abs_floor is not None:
        largest = torch.linalg.vector_norm(precise, ord=float("inf"), dim=(-2, -1), keepdim=True)
        guard = largest.clamp(min=recipe.max_abs_floor) if recipe.max_abs_floor else torch.where(largest == 0, 1, largest)
        precise = precise / guard
    ordered = precise.mT if tall else precise
    norm = ordered.norm() if ordered.ndim == 2 else torch.linalg.vector_norm(ordered, dim=(-2, -1), keepdim=True)
    torch.div(precise, norm + recipe.norm_floor if recipe.norm_guard == "add" else norm.clamp(min=recipe.norm_floor), out=iterate)
