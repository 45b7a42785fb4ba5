"""What a matrix costs its owner: floating-point operations and seconds of the Newton-Schulz form that will run."""

import math
from typing import Literal

from omn_dist.algorithms.iteration import chosen_form, gram_flops, standard_flops, strip_elements, strips, symmetric_flops
from omn_dist.algorithms.newton_schulz import Recipe
from omn_dist.plan.devices import Device, Topology

CostForm = Literal["standard", "cubic", "symmetric", "symmetric cubic", "gram"]
"""What runs at the owner, as far as its cost goes; a cubic step needs no square of the Gram matrix."""

# Kernels of one step, and around the steps (cast, two norms, two divisions, transposes); and calls that make views (counted: the
# transpose of each iterate, working memory and the matrix in its stack).
_LAUNCHES_A_STEP = 3
_LAUNCHES_AROUND = 8
_VIEWS_A_STEP = 1
_VIEWS_AROUND = 12
# Of the symmetric form: parts of the operands of a strip's product, and of its copy.
_VIEWS_A_STRIP = 10
_SYMMETRIC = ("symmetric", "symmetric cubic")
# Collectives of a team beside its steps: whether there is a gradient, and the numbers of the normalisation.
_TEAM_NUMBERS = 2


def newton_schulz_flops(num_rows: int, num_columns: int, num_steps: int, form: CostForm = "standard") -> int:
    """FLOPs of k steps with short side s and long side l: ``k (4 s^2 l + 2 s^3)`` in the standard form.

    Each step makes the Gram matrix (2 s^2 l), its square (2 s^3; not for ``cubic``) and one rectangular product (2 s^2 l). The
    symmetric form computes 5/8 of the first two, see :func:`~omn_dist.algorithms.iteration.symmetric_flops`; the Gram form takes
    ``8 s^2 l + 28 s^3`` for five steps, see :func:`~omn_dist.algorithms.iteration.gram_flops`.
    """
    short, long = sorted((num_rows, num_columns))
    if form == "gram":
        return gram_flops(short, long, num_steps)
    flops = symmetric_flops if form in _SYMMETRIC else standard_flops
    return flops(short, long, num_steps, cubic=form in ("cubic", "symmetric cubic"))


def slice_flops(short: int, width: int, num_steps: int, size: int, form: CostForm) -> int:
    """FLOPs of one member of a team of ``size``: its slice's two products, and its rows of the square; 1/size of a matrix's.

    See :mod:`~omn_dist.algorithms.team_newton_schulz`; rows of zeros that fill up the last block count, since they are multiplied.
    """
    block_rows = -(-short // size)
    return num_steps * (4 * short * short * width + (0 if form == "cubic" else 2 * short * short * block_rows))


def slice_bytes(short: int, num_steps: int, size: int, form: CostForm, itemsize: int) -> int:
    """Bytes that a member sends to the others of its team of ``size``: row blocks of sums, Gram matrices and polynomials.

    And the numbers of the normalisation (two in fp64), and whether there is a gradient (one in fp32).
    """
    block = -(-short // size) * short * itemsize
    return (size - 1) * (num_steps * slice_collectives_a_step(form) * block + 2 * 8 + 4)


def slice_collectives(num_steps: int, form: CostForm) -> int:
    """Collectives of a team for one matrix."""
    return num_steps * slice_collectives_a_step(form) + _TEAM_NUMBERS


def slice_collectives_a_step(form: CostForm) -> int:
    """Sums, Gram matrix and, unless the step is cubic, polynomial."""
    return 2 if form == "cubic" else 3


def cost_form(recipe: Recipe, num_rows: int, num_columns: int) -> CostForm:
    """The form that the recipe runs for a shape."""
    form = chosen_form(recipe.form, recipe.schedule, recipe.dtype, *sorted((num_rows, num_columns)))
    if form == "gram" or not recipe.schedule.is_cubic:
        return form
    return "symmetric cubic" if form == "symmetric" else "cubic"


def newton_schulz_seconds(
    num_rows: int, num_columns: int, num_steps: int, device: Device, itemsize: int, form: CostForm = "standard"
) -> float:
    """Seconds of one matrix on one device: kernels to launch, views to make, products, and bytes to move through memory.

    A step reads and writes about 4 s l + 5 s^2 elements. Products run at the device's rate, which falls for short sides.
    """
    short, long = sorted((num_rows, num_columns))
    flops = newton_schulz_flops(num_rows, num_columns, num_steps, form)
    num_launches = _LAUNCHES_A_STEP * num_steps + _LAUNCHES_AROUND
    num_views = _VIEWS_A_STEP * num_steps + _VIEWS_AROUND
    num_bytes = itemsize * (num_steps * (4 * short * long + 5 * short * short) + 4 * short * long)
    seconds_of_products = flops / device.matmul_rate(short, itemsize)
    if form in _SYMMETRIC:
        cuts = strips(short)
        flops_of_whole = 2 * num_steps * short * short * long
        seconds_of_products = flops_of_whole / device.matmul_rate(short, itemsize)
        seconds_of_products += (flops - flops_of_whole) / device.matmul_rate(cuts[0][1], itemsize)
        num_products = num_steps * (1 if form == "symmetric cubic" else 2)
        # Each strip is a product, and all but the first are copied.
        num_launches += num_products * 2 * (len(cuts) - 1)
        num_views += num_products * _VIEWS_A_STRIP * len(cuts)
        num_bytes += num_products * 2 * itemsize * (short * short - strip_elements(short))
    return (
        num_launches * device.launch_seconds
        + num_views * device.view_seconds
        + seconds_of_products
        + num_bytes / device.memory_bytes_per_second
    )


def slice_seconds(
    short: int,
    width: int,
    num_steps: int,
    size: int,
    device: Device,
    topology: Topology,
    itemsize: int,
    form: CostForm = "standard",
) -> float:
    """Seconds of one member of a team of ``size`` ranks of one node, its collectives included.

    A step of a member reads and writes about 4 s w + 6 s^2 elements: sums go through memory once more than Gram matrices.
    """
    collectives = slice_collectives(num_steps, form)
    block_rows = -(-short // size)
    products = num_steps * 4 * short * short * width / device.matmul_rate(min(short, width), itemsize)
    if form != "cubic":
        products += num_steps * 2 * short * short * block_rows / device.matmul_rate(block_rows, itemsize)
    num_bytes = itemsize * (num_steps * (4 * short * width + 6 * short * short) + 4 * short * width)
    return (
        (2 * _LAUNCHES_A_STEP * num_steps + _LAUNCHES_AROUND) * device.launch_seconds
        + (2 * _VIEWS_A_STEP * num_steps + _VIEWS_AROUND) * device.view_seconds
        + products
        + num_bytes / device.memory_bytes_per_second
        + collectives * topology.latency_seconds * math.ceil(math.log2(size))
        + slice_bytes(short, num_steps, size, form, itemsize) / topology.inside_bytes_per_second
    )
