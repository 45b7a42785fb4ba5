"""Slices: the long side of a matrix cut for a team, so that slices are owned and moved like matrices; and plans with them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from omn_dist.plan.layout import Layout, Piece, intersect
from omn_dist.plan.matrix import Matrix, Slice
from omn_dist.plan.ownership import Plan
from omn_dist.plan.tally import Tally
from omn_dist.plan.waves import Waves, fewest, wave_budget

# A cut moves by no more than this part of a slice's width, to where a shard ends or to a multiple of 16 columns.
_MOST_SHIFT = 1 / 32
_ALIGNMENT = 16
# What a wave may hold above its even part of all elements.
_ROOM = 1.25


def with_teams(plan: Plan, teams: Mapping[str, Sequence[int]], owners: Sequence[int] | None = None) -> Plan:
    """``plan`` with teams of ranks on some of its matrices: new slices, owners and waves; everything else is as before.

    Args:
        plan: of whole matrices. Waves may need as much as its own budget allows its largest matrix.
        teams: ranks of the plan for each matrix that is cut, by its name; the first has the first slice.
        owners: of the matrices in the order of ``plan``, for those that stay whole. When ``None``, heaviest first, each gets the
            rank that has least to do beside its teams.

    Raises:
        ValueError: a name that is no matrix of the plan, ranks that are no team, or a matrix that no team can work on.

    Pure and deterministic.
    """
    matrix_by_name = {matrix.name: matrix for matrix in plan.matrices}
    found: dict[Matrix, int] = {}
    for name, team in teams.items():
        if name not in matrix_by_name:
            raise ValueError(f"teams: found {name!r}, expected names of matrices of the plan, such as {min(matrix_by_name)!r}")
        if sorted(set(team) & set(range(plan.world_size))) != list(team):
            raise ValueError(
                f"matrix {name}: found the team {list(team)}, expected ranks in ascending order below {plan.world_size}, each once"
            )
        found.update(zip(slices_of(matrix_by_name[name], len(team)), team, strict=True))
    if owners is None:
        found.update(_owners_beside(found, [matrix for matrix in plan.matrices if matrix.name not in teams], plan.world_size))
    else:
        pairs = zip(plan.matrices, owners, strict=True)
        found.update((matrix, owner) for matrix, owner in pairs if matrix.name not in teams)
    matrices = sorted(found, key=_whole_name)
    chosen = tuple(found[matrix] for matrix in matrices)
    budget = wave_budget(plan.wave_bytes, Tally(plan.matrices, plan.owners, plan.world_size, plan.wire_itemsize))
    waves = _waves(matrices, chosen, plan.world_size, budget, plan.wire_itemsize)
    return replace(plan, matrices=tuple(matrices), owners=chosen, waves=waves)


def _owners_beside(slices: Mapping[Matrix, int], matrices: Sequence[Matrix], world_size: int) -> dict[Matrix, int]:
    """Owners of whole matrices by longest processing time, where ranks have ``slices`` to work on already."""
    loads = [0] * world_size
    for part, rank in slices.items():
        loads[rank] += part.flops
    found = {}
    for matrix in sorted(matrices, key=lambda matrix: (-matrix.flops, matrix.name)):
        found[matrix] = min(matrix.candidates(), key=lambda rank: (loads[rank], rank))
        loads[found[matrix]] += matrix.flops
    return found


def _waves(
    matrices: Sequence[Matrix], owners: Sequence[int], world_size: int, budget: int, wire_itemsize: int
) -> tuple[tuple[int, ...], ...]:
    """Waves like those of ``plan.waves``, with all slices of a matrix in one wave.

    Heaviest first, each matrix (or all its slices) goes to that of the waves with room in which it makes ranks wait least for
    each other. Room is counted in elements, so that waves need about the same bytes. In a wave that order stays: so ranks that
    share several teams work for them in one order, and for the longest first.
    """
    by_whole: dict[str, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_whole.setdefault(_whole_name(matrix), []).append(index)
    flops = np.array([matrix.flops for matrix in matrices], dtype=np.int64)
    sizes = np.array([matrix.num_elements for matrix in matrices], dtype=np.int64)
    units = sorted(by_whole.values(), key=lambda unit: (-int(flops[unit].max()), -len(unit), matrices[unit[0]].name))

    def cut(num_waves: int) -> Waves:
        loads = np.zeros((num_waves, world_size), dtype=np.int64)
        held: NDArray[np.int64] = np.zeros(num_waves, dtype=np.int64)
        room = _ROOM * int(sizes.sum()) / num_waves
        waves: Waves = [[] for _ in range(num_waves)]
        for unit in units:
            ranks, size = [owners[index] for index in unit], int(sizes[unit].sum())
            after = (loads[:, ranks] + flops[unit]).max(axis=1)
            # A wave takes as long as its slowest rank.
            longer = np.maximum(after - loads.max(axis=1), 0)
            possible = np.flatnonzero(held + size <= room)
            wave = min(possible, key=lambda wave: (longer[wave], held[wave])) if len(possible) else int(held.argmin())
            loads[wave, ranks] += flops[unit]
            held[wave] += size
            waves[wave] += unit
        return [wave for wave in waves if wave]

    tally = Tally(matrices, owners, world_size, wire_itemsize)
    waves = fewest(cut, tally, budget, [list(range(len(units)))])
    return tuple(tuple(wave) for wave in waves)


def _whole_name(matrix: Matrix) -> str:
    return matrix.name if matrix.slice is None else matrix.slice.whole


def slices_of(matrix: Matrix, size: int) -> list[Matrix]:
    """``matrix`` as ``size`` slices of its long side: an exact partition, of about equal widths.

    Raises:
        ValueError: fewer than two slices, more than the long side has elements, or a matrix whose update needs one owner.
    """
    whole = Slice(matrix.name, 0, size, matrix.stored_rows, matrix.stored_columns)
    long = max(matrix.stored_rows, matrix.stored_columns)
    if matrix.whole_only:
        raise ValueError(f"matrix {matrix.name}: found a team for {matrix.whole_only}, expected one owner; leave it out of teams")
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
        found.append(
            replace(
                matrix,
                name=f"{matrix.name}[slice {index} of {size}]",
                stored_rows=len(rows),
                stored_columns=len(columns),
                region=tuple(part for piece in matrix.region if (part := _cut(piece, rows, columns)) is not None),
                slice=replace(whole, index=index),
            )
        )
    return found


@lru_cache(maxsize=4096)
def _cuts(layout: Layout, region: tuple[Piece, ...], long: int, size: int, cuts_rows: bool) -> tuple[int, ...]:
    """Where slices of the long side start, and its end: even widths, but for small shifts.

    Rows are cut where a shard ends, so that no rank has a part of two slices; columns at aligned places, which matrix units like.
    """
    width = long / size
    places = np.arange(0, long, _ALIGNMENT)
    if cuts_rows:
        held = [intersect(layout.pieces(rank), region) for rank in range(layout.world_size)]
        places = np.unique([segment.matrix_row for segments in held for segment in segments])
    cuts = [0]
    for index in range(1, size):
        even = long * index // size
        nearest = int(places[np.abs(places - even).argmin()])
        cuts.append(nearest if abs(nearest - even) <= width * _MOST_SHIFT else even)
    return (*cuts, long)


def _cut(piece: Piece, rows: range, columns: range) -> Piece | None:
    """What a piece has of these rows and columns of the matrix, placed in the slice that they are."""
    row, column = max(piece.at_row, rows.start), max(piece.at_column, columns.start)
    num_rows = min(piece.at_row + piece.num_rows, rows.stop) - row
    num_columns = min(piece.at_column + piece.num_columns, columns.stop) - column
    if num_rows <= 0 or num_columns <= 0:
        return None
    return Piece(
        piece.row + row - piece.at_row,
        piece.column + column - piece.at_column,
        num_rows,
        num_columns,
        row - rows.start,
        column - columns.start,
    )
