"""What a matrix costs its owner: floating-point operations and seconds of the Newton-Schulz form that will run."""

from typing import Literal

from omn_dist.plan.devices import Device

Form = Literal["standard", "symmetric", "gram", "gram-symmetric"]
"""``standard``: every step on the whole matrix. ``gram``: iterate on the s x s Gram matrix, one rectangular product at each end and
one restart. ``symmetric``: symmetric products at half their cost."""

# Kernels of one step, and around the steps (cast, two norms, two divisions, transposes).
_LAUNCHES_A_STEP = 3
_LAUNCHES_AROUND = 8


def newton_schulz_flops(num_rows: int, num_columns: int, num_steps: int, form: Form = "standard") -> int:
    """FLOPs for short side s, long side l and k steps.

    Standard: each step makes the Gram matrix (2 s^2 l), its square (2 s^3) and one rectangular product (2 s^2 l), so
    ``k (4 s^2 l + 2 s^3)``. Gram: ``8 s^2 l + 28 s^3`` for five steps, its second part in proportion to k. With symmetric
    products at half their cost: ``k (3 s^2 l + s^3)`` and ``6 s^2 l + 14 s^3``.
    """
    short, long = sorted((num_rows, num_columns))
    rectangle, cube = short * short * long, short**3
    if form == "standard":
        return num_steps * (4 * rectangle + 2 * cube)
    if form == "symmetric":
        return num_steps * (3 * rectangle + cube)
    if form == "gram":
        return 8 * rectangle + 28 * cube * num_steps // 5
    return 6 * rectangle + 14 * cube * num_steps // 5


def newton_schulz_seconds(
    num_rows: int, num_columns: int, num_steps: int, device: Device, itemsize: int, form: Form = "standard"
) -> float:
    """Seconds of one matrix on one device: kernels to launch, products, and bytes to move through memory.

    A step reads and writes about 4 s l + 5 s^2 elements. Products run at the device's rate, which falls for short sides.
    """
    short, long = sorted((num_rows, num_columns))
    flops = newton_schulz_flops(num_rows, num_columns, num_steps, form)
    num_bytes = itemsize * (num_steps * (4 * short * long + 5 * short * short) + 4 * short * long)
    return (
        (_LAUNCHES_A_STEP * num_steps + _LAUNCHES_AROUND) * device.launch_seconds
        + flops / device.matmul_rate(short, itemsize)
        + num_bytes / device.memory_bytes_per_second
    )
