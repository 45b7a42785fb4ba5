"""What Newton-Schulz costs in FLOPs, and a team of ranks in bytes and collectives too."""

from typing import Literal

from omn_dist.algorithms.iteration import chosen_form, gram_flops, standard_flops
from omn_dist.algorithms.newton_schulz import Recipe

CostForm = Literal["standard", "cubic", "gram"]
"""The form of the iteration, as far as its cost goes; cubic steps do not square the Gram matrix."""

# Collectives of a team beside those of its steps: presence of a gradient, normalisation.
_TEAM_NUMBERS = 2


def cost_form(recipe: Recipe, num_rows: int, num_columns: int) -> CostForm:
    """The form in which the recipe runs for a shape."""
    form = chosen_form(recipe.form, recipe.schedule, *sorted((num_rows, num_columns)))
    if form == "gram":
        return form
    return "cubic" if recipe.schedule.is_cubic else "standard"


def newton_schulz_flops(num_rows: int, num_columns: int, ns_steps: int, form: CostForm = "standard") -> int:
    """FLOPs of k steps with short side s and long side l: standard ``k (4 s^2 l + 2 s^3)``.

    Each step computes the Gram matrix (2 s^2 l), its square (2 s^3; not in a cubic step) and one
    rectangular product (2 s^2 l). The Gram form takes ``8 s^2 l + 28 s^3`` for five steps, see
    :func:`~omn_dist.algorithms.iteration.gram_flops`.
    """
    short, long = sorted((num_rows, num_columns))
    if form == "gram":
        return gram_flops(short, long, ns_steps)
    return standard_flops(short, long, ns_steps, cubic=form == "cubic")


def slice_flops(short: int, width: int, ns_steps: int, size: int, form: CostForm) -> int:
    """FLOPs of a member of a team of ``size``: two products with its slice, its rows of the square.

    See :mod:`~omn_dist.algorithms.team_newton_schulz`. The rows of zeros that pad the last member's
    rows of the square count too, since they are multiplied.
    """
    square_rows = -(-short // size)
    return ns_steps * (4 * short * short * width + (0 if form == "cubic" else 2 * short * short * square_rows))


def slice_bytes(short: int, ns_steps: int, size: int, form: CostForm, itemsize: int) -> int:
    """Bytes that a member sends to the others of its team of ``size`` for one matrix.

    Each collective of a step sends ``short / size`` rows of a square matrix to every other member.
    The normalisation sends two fp64 numbers, and one fp32 number says whether there is a gradient.
    """
    rows_bytes = -(-short // size) * short * itemsize
    return (size - 1) * (ns_steps * _collectives_a_step(form) * rows_bytes + 2 * 8 + 4)


def slice_collectives(ns_steps: int, form: CostForm) -> int:
    """Collectives of a team for one matrix."""
    return ns_steps * _collectives_a_step(form) + _TEAM_NUMBERS


def _collectives_a_step(form: CostForm) -> int:
    """Partial sums, Gram matrix and, unless the step is cubic, polynomial."""
    return 2 if form == "cubic" else 3
