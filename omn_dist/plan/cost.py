"""What a matrix costs its owner: floating-point operations and seconds of the Newton-Schulz form that will run."""

from typing import Literal

from omn_dist.algorithms.iteration import chosen_form, gram_flops, standard_flops
from omn_dist.algorithms.newton_schulz import Recipe
from omn_dist.plan.devices import Device

CostForm = Literal["standard", "cubic", "gram"]
"""What runs at the owner, as far as its cost goes; a cubic step needs no square of the Gram matrix."""

# Kernels of one step, and around the steps (cast, two norms, two divisions, transposes); and calls that make views (counted: the
# transpose of each iterate, working memory and the matrix in its stack).
_LAUNCHES_A_STEP = 3
_LAUNCHES_AROUND = 8
_VIEWS_A_STEP = 1
_VIEWS_AROUND = 12


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


def newton_schulz_seconds(
    num_rows: int, num_columns: int, num_steps: int, device: Device, itemsize: int, form: CostForm = "standard"
) -> float:
    """Seconds of one matrix on one device: kernels to launch, views to make, products, and bytes to move through memory.

    A step reads and writes about 4 s l + 5 s^2 elements. Products run at the device's rate, which falls for short sides.
    """
    short, long = sorted((num_rows, num_columns))
    flops = newton_schulz_flops(num_rows, num_columns, num_steps, form)
    num_bytes = itemsize * (num_steps * (4 * short * long + 5 * short * short) + 4 * short * long)
    return (
        (_LAUNCHES_A_STEP * num_steps + _LAUNCHES_AROUND) * device.launch_seconds
        + (_VIEWS_A_STEP * num_steps + _VIEWS_AROUND) * device.view_seconds
        + flops / device.matmul_rate(short, itemsize)
        + num_bytes / device.memory_bytes_per_second
    )
