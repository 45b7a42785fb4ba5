"""Predicted seconds of Newton-Schulz, on one device and on a team of ranks."""

import math

from omn_dist.plan.geometry.flops import newton_schulz_flops, slice_bytes, slice_collectives
from omn_dist.plan.geometry.matrix import Matrix, Work
from omn_dist.plan.predict.devices import Device, Topology

# Kernels of one step, and around the steps: a cast, two norms, two divisions, transposes.
_LAUNCHES_A_STEP = 3
_LAUNCHES_AROUND = 8
# Calls that make views: the transpose of each iterate, working memory, the matrix in its stack.
_VIEWS_A_STEP = 1
_VIEWS_AROUND = 12


def matrix_seconds(matrix: Matrix, device: Device, topology: Topology) -> float:
    """Newton-Schulz seconds of a matrix at its owner, or of a slice together with its team."""
    if matrix.slice is None:
        return newton_schulz_seconds(matrix.stored_rows, matrix.stored_columns, matrix.work, device)
    return slice_seconds(*matrix.slice_sides, matrix.slice.size, matrix.work, device, topology)


def newton_schulz_seconds(num_rows: int, num_columns: int, work: Work, device: Device) -> float:
    """Seconds of one matrix on one device: launches, views, products, bytes read and written.

    With short side s and long side l, a step reads and writes about ``4 s l + 5 s^2`` elements.
    Products run at the device's rate, which is lower for short sides.
    """
    short, long = sorted((num_rows, num_columns))
    flops = newton_schulz_flops(num_rows, num_columns, work.ns_steps, work.form)
    num_bytes = work.itemsize * (work.ns_steps * (4 * short * long + 5 * short * short) + 4 * short * long)
    return (
        (_LAUNCHES_A_STEP * work.ns_steps + _LAUNCHES_AROUND) * device.launch_seconds
        + (_VIEWS_A_STEP * work.ns_steps + _VIEWS_AROUND) * device.view_seconds
        + flops / device.matmul_rate(short, work.itemsize)
        + num_bytes / device.memory_bytes_per_second
    )


def slice_seconds(short: int, width: int, size: int, work: Work, device: Device, topology: Topology) -> float:
    """Seconds of one member of a team of ``size`` ranks of one node, its collectives included.

    With short side s and a slice of width w, a step reads and writes about ``4 s w + 6 s^2``
    elements: the partial sums of a team go through memory in addition to its Gram matrix.
    """
    square_rows = -(-short // size)
    products = work.ns_steps * 4 * short * short * width / device.matmul_rate(min(short, width), work.itemsize)
    if work.form != "cubic":
        products += work.ns_steps * 2 * short * short * square_rows / device.matmul_rate(square_rows, work.itemsize)
    num_bytes = work.itemsize * (work.ns_steps * (4 * short * width + 6 * short * short) + 4 * short * width)
    num_collectives = slice_collectives(work.ns_steps, work.form)
    sent = slice_bytes(short, work.ns_steps, size, work.form, work.itemsize)
    return (
        (2 * _LAUNCHES_A_STEP * work.ns_steps + _LAUNCHES_AROUND) * device.launch_seconds
        + (2 * _VIEWS_A_STEP * work.ns_steps + _VIEWS_AROUND) * device.view_seconds
        + products
        + num_bytes / device.memory_bytes_per_second
        + num_collectives * topology.latency_seconds * math.ceil(math.log2(size))
        + sent / topology.inside_bytes_per_second
    )
