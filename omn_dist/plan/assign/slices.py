"""Slices of matrices for teams of ranks, and owners and waves of plans that have some."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from omn_dist.plan.assign.waves import Waves, fewest_waves
from omn_dist.plan.geometry.layout import Layout, Region, intersect
from omn_dist.plan.geometry.matrix import Matrix, TeamSlice
from omn_dist.plan.geometry.traffic import TrafficCounter

# A cut moves by at most this fraction of a slice's width.
_MOST_SHIFT = 1 / 32
_ALIGNMENT = 16
# Elements of a wave, over its even share of all elements.
_ROOM = 1.25


def slices_of(matrix: Matrix, size: int) -> list[Matrix]:
    """``matrix`` as ``size`` slices of its long side: an exact partition into about equal widths.

    Raises:
        ValueError: fewer than two slices, more than the long side has elements, or a matrix whose
            update needs one owner.
    """
    whole = TeamSlice(matrix.name, 0, size, matrix.stored_rows, matrix.stored_columns)
    long = max(matrix.stored_rows, matrix.stored_columns)
    if reason := matrix.work.whole_only:
        raise ValueError(f"matrix {matrix.name}: found a team for {reason}, expected one owner; leave it out of teams")
    if not 2 <= size <= long:
        raise ValueError(
            f"matrix {matrix.name}: found a team of {size}, expected 2 to {long} members, as its long side has elements"
        )
    cuts = _cuts(matrix.layout, matrix.region, long, size, whole.cuts_rows)
    found = []
    for index, (start, stop) in enumerate(itertools.pairwise(cuts)):
        rows, columns = range(matrix.stored_rows), range(matrix.stored_columns)
        if whole.cuts_rows:
            rows = range(start, stop)
        else:
            columns = range(start, stop)
        regions = (_region_in_slice(region, rows, columns) for region in matrix.region)
        found.append(
            replace(
                matrix,
                name=f"{matrix.name}[slice {index} of {size}]",
                stored_rows=len(rows),
                stored_columns=len(columns),
                region=tuple(region for region in regions if region is not None),
                slice=replace(whole, index=index),
            )
        )
    return found


@lru_cache(maxsize=4096)
def _cuts(layout: Layout, region: tuple[Region, ...], long: int, size: int, cuts_rows: bool) -> tuple[int, ...]:
    """Start of each slice along the long side, and the end of the last: even up to small shifts.

    Rows are cut at the ends of shards, so that no rank holds parts of two slices; columns at
    aligned positions, where matrix units are fastest.
    """
    width = long / size
    positions = np.arange(0, long, _ALIGNMENT)
    if cuts_rows:
        shards = (intersect(layout.regions(rank), region) for rank in range(layout.world_size))
        positions = np.unique([common.matrix_row for shard in shards for common in shard])
    cuts = [0]
    for index in range(1, size):
        even = long * index // size
        nearest = int(positions[np.abs(positions - even).argmin()])
        cuts.append(nearest if abs(nearest - even) <= width * _MOST_SHIFT else even)
    return (*cuts, long)


def _region_in_slice(region: Region, rows: range, columns: range) -> Region | None:
    """What a region of the matrix has in common with a slice, with its position in the slice."""
    row, column = max(region.at_row, rows.start), max(region.at_column, columns.start)
    num_rows = min(region.at_row + region.num_rows, rows.stop) - row
    num_columns = min(region.at_column + region.num_columns, columns.stop) - column
    if num_rows <= 0 or num_columns <= 0:
        return None
    return Region(
        region.row + row - region.at_row,
        region.column + column - region.at_column,
        num_rows,
        num_columns,
        row - rows.start,
        column - columns.start,
    )


def owners_beside(slices: Mapping[Matrix, int], matrices: Sequence[Matrix], world_size: int) -> dict[Matrix, int]:
    """Owners of whole matrices by longest processing time, on ranks that work on ``slices`` too."""
    loads = [0] * world_size
    for matrix, rank in slices.items():
        loads[rank] += matrix.flops
    found = {}
    for matrix in sorted(matrices, key=lambda matrix: (-matrix.flops, matrix.name)):
        found[matrix] = min(matrix.candidates(), key=lambda rank: (loads[rank], rank))
        loads[found[matrix]] += matrix.flops
    return found


def assign_team_waves(
    matrices: Sequence[Matrix], owners: Sequence[int], world_size: int, budget: int, communication_itemsize: int
) -> tuple[tuple[int, ...], ...]:
    """Waves of matrices and slices under a byte budget, with all slices of a matrix in one wave.

    Heaviest first, each matrix (or all its slices) goes to the wave in which ranks wait least for
    each other, among the waves with room. Room is counted in elements, so that waves need about the
    same bytes. A wave keeps this order: ranks that share several teams work for them in one order,
    and for the longest first.

    Args:
        matrices: matrices and slices, those of one matrix in the order of their indices.
        owners: the owner of each.
        world_size: number of ranks.
        budget: bytes of one slot and of the stack.
        communication_itemsize: bytes of one element in flight.
    """
    by_whole: dict[str, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_whole.setdefault(matrix.whole_name, []).append(index)
    flops = np.array([matrix.flops for matrix in matrices], dtype=np.int64)
    sizes = np.array([matrix.num_elements for matrix in matrices], dtype=np.int64)
    units = sorted(by_whole.values(), key=lambda unit: (-int(flops[unit].max()), -len(unit), matrices[unit[0]].name))

    def fill(num_waves: int) -> Waves:
        loads = np.zeros((num_waves, world_size), dtype=np.int64)
        elements: NDArray[np.int64] = np.zeros(num_waves, dtype=np.int64)
        room = _ROOM * int(sizes.sum()) / num_waves
        waves: Waves = [[] for _ in range(num_waves)]
        for unit in units:
            ranks, size = [owners[index] for index in unit], int(sizes[unit].sum())
            after = (loads[:, ranks] + flops[unit]).max(axis=1)
            # A wave takes as long as its slowest rank.
            longer = np.maximum(after - loads.max(axis=1), 0)
            possible = np.flatnonzero(elements + size <= room)
            wave = min(possible, key=lambda wave: (longer[wave], elements[wave])) if len(possible) else int(elements.argmin())
            loads[wave, ranks] += flops[unit]
            elements[wave] += size
            waves[wave] += unit
        return [wave for wave in waves if wave]

    counter = TrafficCounter(matrices, owners, world_size, communication_itemsize)
    waves = fewest_waves(fill, counter, budget, [list(range(len(units)))])
    return tuple(tuple(wave) for wave in waves)
