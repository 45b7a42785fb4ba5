"""Which regions of a stored parameter each rank holds, as pure data.

A parameter with any number of dims is treated as two-dim: its leading dims are flattened into
rows, its last dim gives the columns. The local tensor of a rank is treated the same way. A layout
lists, for each rank, the rectangles (regions) that the two have in common, with their positions in
both.
"""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


class AxisPlacement(NamedTuple):
    """How one mesh axis distributes a tensor.

    ``shard`` cuts tensor dim ``dim`` like ``torch.chunk``. ``strided`` cuts it as if later mesh
    axes had cut it into ``split_factor`` chunks first; FSDP2 does this on top of tensor
    parallelism. ``replicate`` gives every rank of the axis an equal copy.
    """

    kind: Literal["shard", "strided", "replicate"]
    dim: int = 0
    split_factor: int = 1


SHARD_ROWS = AxisPlacement("shard", 0)
REPLICATE = AxisPlacement("replicate")


class Region(NamedTuple):
    """A rectangle of a stored parameter, and its position in a second array.

    The second array is a rank's local tensor or a matrix; ``at_row`` and ``at_column`` are in it.
    """

    row: int
    column: int
    num_rows: int
    num_columns: int
    at_row: int
    at_column: int


class ShardRegion(NamedTuple):
    """A rectangle that a rank's local tensor and a matrix have in common: its position in both."""

    num_rows: int
    num_columns: int
    local_row: int
    local_column: int
    matrix_row: int
    matrix_column: int

    @property
    def num_elements(self) -> int:
        """Rows times columns."""
        return self.num_rows * self.num_columns


class _Interval(NamedTuple):
    """An interval of one tensor dim, and its start in the local tensor."""

    start: int
    length: int
    at: int


@dataclass(frozen=True)
class Layout:
    """How one parameter is distributed over the ranks of a device mesh."""

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[AxisPlacement, ...]
    """One for each mesh axis, applied from left to right."""
    positions: tuple[int, ...] = ()
    """Position of each rank in the flattened mesh; empty when ranks follow its order."""

    def __post_init__(self) -> None:
        if len(self.mesh_shape) != len(self.placements):
            raise ValueError(f"layout: {len(self.placements)} placements for {len(self.mesh_shape)} mesh axes, expected one each")
        for placement in self.placements:
            if placement.kind != "replicate" and not 0 <= placement.dim < len(self.shape):
                raise ValueError(f"layout: placement {placement} of a tensor of shape {self.shape}, expected one of its dims")

    @property
    def world_size(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.mesh_shape)

    @property
    def num_rows(self) -> int:
        """Rows of the parameter with its leading dims flattened."""
        return math.prod(self.shape[:-1])

    @property
    def num_columns(self) -> int:
        """Size of the last dim."""
        return self.shape[-1]

    def replica(self, rank: int) -> tuple[int, ...]:
        """The coordinates of ``rank`` on the replicated axes.

        Ranks with equal coordinates hold one copy of the parameter together.
        """
        return tuple(
            position
            for position, placement in zip(self._coordinates(rank), self.placements, strict=True)
            if placement.kind == "replicate"
        )

    def regions(self, rank: int) -> tuple[Region, ...]:
        """The regions that ``rank`` holds, with their positions in its local tensor."""
        return _regions(self, self._shard_coordinates(rank))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the local tensor of ``rank``."""
        intervals = _intervals_by_dim(self, self._shard_coordinates(rank))
        return tuple(sum(interval.length for interval in found) for found in intervals)

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        position = self.positions[rank] if self.positions else rank
        coordinates = []
        for size in reversed(self.mesh_shape):
            position, coordinate = divmod(position, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def _shard_coordinates(self, rank: int) -> tuple[int, ...]:
        """Coordinates with zeros on replicated axes: ranks with equal ones hold equal regions."""
        return tuple(
            0 if placement.kind == "replicate" else position
            for position, placement in zip(self._coordinates(rank), self.placements, strict=True)
        )


@lru_cache(maxsize=65536)
def _regions(layout: Layout, coordinates: tuple[int, ...]) -> tuple[Region, ...]:
    *leading, columns = _intervals_by_dim(layout, coordinates)
    rows = _flatten(leading, layout.shape[:-1])
    return tuple(
        Region(row.start, column.start, row.length, column.length, row.at, column.at)
        for row, column in itertools.product(rows, columns)
        if row.length and column.length
    )


def _intervals_by_dim(layout: Layout, coordinates: tuple[int, ...]) -> list[list[_Interval]]:
    intervals = [[_Interval(0, size, 0)] for size in layout.shape]
    for position, size, placement in zip(coordinates, layout.mesh_shape, layout.placements, strict=True):
        if placement.kind == "replicate":
            continue
        current = intervals[placement.dim]
        num_outer = placement.split_factor if placement.kind == "strided" else 1
        outer = [_torch_chunk(current, num_outer, index) for index in range(num_outer)]
        intervals[placement.dim] = _renumbered(itertools.chain.from_iterable(_torch_chunk(cut, size, position) for cut in outer))
    return intervals


def _torch_chunk(intervals: list[_Interval], num_chunks: int, index: int) -> list[_Interval]:
    """Chunk ``index`` of the concatenated intervals, with the sizes of ``torch.chunk``."""
    total = sum(interval.length for interval in intervals)
    size = -(-total // num_chunks)
    first, last = min(index * size, total), min((index + 1) * size, total)
    found, end = [], 0
    for interval in intervals:
        low, high = max(first, end), min(last, end + interval.length)
        if low < high:
            found.append(_Interval(interval.start + low - end, high - low, 0))
        end += interval.length
    return found


def _renumbered(intervals: "itertools.chain[_Interval]") -> list[_Interval]:
    """The intervals at consecutive positions of the local tensor; adjacent intervals are merged."""
    found: list[_Interval] = []
    at = 0
    for interval in intervals:
        if found and found[-1].start + found[-1].length == interval.start:
            found[-1] = found[-1]._replace(length=found[-1].length + interval.length)
        else:
            found.append(_Interval(interval.start, interval.length, at))
        at += interval.length
    return found


def _flatten(intervals_by_dim: list[list[_Interval]], sizes: tuple[int, ...]) -> list[_Interval]:
    """Intervals of several dims as intervals of the flattened dims."""
    flat, size, local_size = [_Interval(0, 1, 0)], 1, 1
    for intervals, outer in zip(reversed(intervals_by_dim), reversed(sizes), strict=True):
        if flat == [_Interval(0, size, 0)]:
            flat = [_Interval(interval.start * size, interval.length * size, interval.at * size) for interval in intervals]
        else:
            flat = [
                _Interval(
                    (interval.start + index) * size + inner.start, inner.length, (interval.at + index) * local_size + inner.at
                )
                for interval in intervals
                for index in range(interval.length)
                for inner in flat
            ]
        size *= outer
        local_size *= sum(interval.length for interval in intervals)
    return flat


def intersect(shard: tuple[Region, ...], matrix_region: tuple[Region, ...]) -> tuple[ShardRegion, ...]:
    """What the regions of a shard and those of a matrix have in common, in the shard's order."""
    common = []
    for local, own in itertools.product(shard, matrix_region):
        row = max(local.row, own.row)
        column = max(local.column, own.column)
        num_rows = min(local.row + local.num_rows, own.row + own.num_rows) - row
        num_columns = min(local.column + local.num_columns, own.column + own.num_columns) - column
        if num_rows > 0 and num_columns > 0:
            common.append(
                ShardRegion(
                    num_rows,
                    num_columns,
                    local.at_row + row - local.row,
                    local.at_column + column - local.column,
                    own.at_row + row - own.row,
                    own.at_column + column - own.column,
                )
            )
    return tuple(common)


def shard_regions(layout: Layout, matrix_region: tuple[Region, ...], rank: int) -> tuple[ShardRegion, ...]:
    """The regions of a matrix that ``rank`` holds. Matrices with equal layouts share the result."""
    return _shard_regions(layout, matrix_region, layout._shard_coordinates(rank))


@lru_cache(maxsize=4096)
def _shard_regions(layout: Layout, matrix_region: tuple[Region, ...], coordinates: tuple[int, ...]) -> tuple[ShardRegion, ...]:
    return intersect(_regions(layout, coordinates), matrix_region)


class Holdings(NamedTuple):
    """How much of one matrix each rank holds: read-only arrays of shape ``[world_size]``."""

    elements: NDArray[np.int64]
    replica: NDArray[np.int64]
    """The index of the copy of the parameter to which the rank's shard belongs."""
    rows: NDArray[np.int64]
    """Stored rows, summed over the regions of the rank; a row in two regions counts twice."""
    columns: NDArray[np.int64]
    """Stored columns, summed likewise."""


@lru_cache(maxsize=4096)
def holdings(layout: Layout, matrix_region: tuple[Region, ...]) -> Holdings:
    """How much of a matrix each rank holds, and in which copy of the parameter."""
    by_coordinates: dict[tuple[int, ...], tuple[int, int, int]] = {}
    copies: dict[tuple[int, ...], int] = {}
    elements, replica, rows, columns = np.zeros((4, layout.world_size), dtype=np.int64)
    for rank in range(layout.world_size):
        coordinates = layout._shard_coordinates(rank)
        if coordinates not in by_coordinates:
            found = intersect(_regions(layout, coordinates), matrix_region)
            by_coordinates[coordinates] = (
                sum(region.num_elements for region in found),
                sum(region.num_rows for region in found),
                sum(region.num_columns for region in found),
            )
        elements[rank], rows[rank], columns[rank] = by_coordinates[coordinates]
        replica[rank] = copies.setdefault(layout.replica(rank), len(copies))
    arrays = Holdings(elements, replica, rows, columns)
    for array in arrays:
        array.setflags(write=False)
    return arrays
