"""What a matrix costs its owner: floating-point operations of the Newton-Schulz form that will run."""

from typing import Literal

from omn_dist.algorithms.iteration import chosen_form, gram_flops, standard_flops
from omn_dist.algorithms.newton_schulz import Recipe

CostForm = Literal["standard", "cubic", "gram"]
"""What runs at the owner, as far as its cost goes; a cubic step needs no square of the Gram matrix."""


def newton_schulz_flops(num_rows: int, num_columns: int, num_steps: int, form: CostForm = "standard") -> int:
    """FLOPs of k steps with short side s and long side l: ``k (4 s^2 l + 2 s^3)`` in the standard form.

    Each step makes the Gram matrix (2 s^2 l), its square (2 s^3; not for ``cubic``) and one rectangular product (2 s^2 l). The
    Gram form takes ``8 s^2 l + 28 s^3`` for five steps, see :func:`~omn_dist.algorithms.iteration.gram_flops`.
    """
    short, long = sorted((num_rows, num_columns))
    if form == "gram":
        return gram_flops(short, long, num_steps)
    return standard_flops(short, long, num_steps, cubic=form == "cubic")


def cost_form(recipe: Recipe, num_rows: int, num_columns: int) -> CostForm:
    """The form that the recipe runs for a shape."""
    if chosen_form(recipe.form, recipe.schedule, *sorted((num_rows, num_columns))) == "gram":
        return "gram"
    return "cubic" if recipe.schedule.is_cubic else "standard"
