"""Which rectangles of a stored parameter each rank holds, as pure data.

A parameter of any number of dims is looked at as a matrix: leading dims flattened into rows, the last dim as columns.
So is the local tensor of a rank. A layout says, for each rank, which rectangles of the one lie where in the other.
"""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Placement(NamedTuple):
    """What one mesh axis does to a tensor.

    ``shard``: cut tensor dim ``dim`` like ``torch.chunk``. ``strided``: cut it as if ``split_factor`` equal cuts of later
    mesh axes had come before (what FSDP2 does on top of tensor parallelism). ``replicate``: equal copies.
    """

    kind: Literal["shard", "strided", "replicate"]
    dim: int = 0
    split_factor: int = 1


SHARD_ROWS = Placement("shard", 0)
REPLICATE = Placement("replicate")


class Piece(NamedTuple):
    """A rectangle of a stored parameter, and where it lies in a second array (a rank's local tensor, or a matrix)."""

    row: int
    column: int
    num_rows: int
    num_columns: int
    at_row: int
    at_column: int


class Segment(NamedTuple):
    """A rectangle that a rank's local tensor and a matrix have in common, with its place in both."""

    num_rows: int
    num_columns: int
    local_row: int
    local_column: int
    matrix_row: int
    matrix_column: int

    @property
    def num_elements(self) -> int:
        """How many elements the rectangle has."""
        return self.num_rows * self.num_columns


class _Run(NamedTuple):
    """An interval of one tensor dim, and where it starts in the local tensor."""

    start: int
    length: int
    at: int


@dataclass(frozen=True)
class Layout:
    """How one parameter lies on the ranks of a device mesh."""

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    """One for each mesh axis, applied from left to right."""
    positions: tuple[int, ...] = ()
    """Position of each rank in the flattened mesh; empty when ranks are numbered along it."""

    def __post_init__(self) -> None:
        if len(self.mesh_shape) != len(self.placements):
            raise ValueError(f"layout: {len(self.placements)} placements for {len(self.mesh_shape)} mesh axes, expected one each")
        for placement in self.placements:
            if placement.kind != "replicate" and not 0 <= placement.dim < len(self.shape):
                raise ValueError(f"layout: placement {placement} of a tensor of shape {self.shape}, expected one of its dims")

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.mesh_shape)

    @property
    def num_rows(self) -> int:
        """Rows of the parameter looked at as a matrix."""
        return math.prod(self.shape[:-1])

    @property
    def num_columns(self) -> int:
        """Columns of the parameter looked at as a matrix."""
        return self.shape[-1]

    def replica(self, rank: int) -> tuple[int, ...]:
        """The coordinates of ``rank`` on the replicated axes: ranks with equal ones hold one whole copy together."""
        return tuple(
            position
            for position, placement in zip(self._coordinates(rank), self.placements, strict=True)
            if placement.kind == "replicate"
        )

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The rectangles that ``rank`` holds, with their places in its local tensor; none when its shard is empty."""
        return _pieces(self, self._shard_coordinates(rank))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the local tensor of ``rank``."""
        runs = _runs_by_dim(self, self._shard_coordinates(rank))
        return tuple(sum(run.length for run in found) for found in runs)

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        position = self.positions[rank] if self.positions else rank
        coordinates = []
        for size in reversed(self.mesh_shape):
            position, coordinate = divmod(position, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def _shard_coordinates(self, rank: int) -> tuple[int, ...]:
        """Coordinates with zeros on the replicated axes: all that decides what a rank holds."""
        return tuple(
            0 if placement.kind == "replicate" else position
            for position, placement in zip(self._coordinates(rank), self.placements, strict=True)
        )


@lru_cache(maxsize=65536)
def _pieces(layout: Layout, coordinates: tuple[int, ...]) -> tuple[Piece, ...]:
    *leading, columns = _runs_by_dim(layout, coordinates)
    rows = _flatten(leading, layout.shape[:-1])
    return tuple(
        Piece(row.start, column.start, row.length, column.length, row.at, column.at)
        for row, column in itertools.product(rows, columns)
        if row.length and column.length
    )


def _runs_by_dim(layout: Layout, coordinates: tuple[int, ...]) -> list[list[_Run]]:
    runs = [[_Run(0, size, 0)] for size in layout.shape]
    for position, size, placement in zip(coordinates, layout.mesh_shape, layout.placements, strict=True):
        if placement.kind == "replicate":
            continue
        held = runs[placement.dim]
        num_parts = placement.split_factor if placement.kind == "strided" else 1
        parts = [_chunk(held, num_parts, index) for index in range(num_parts)]
        runs[placement.dim] = _renumbered(itertools.chain.from_iterable(_chunk(part, size, position) for part in parts))
    return runs


def _chunk(runs: list[_Run], num_chunks: int, index: int) -> list[_Run]:
    """Chunk ``index`` of the concatenated runs, cut like ``torch.chunk``."""
    total = sum(run.length for run in runs)
    size = -(-total // num_chunks)
    first, last = min(index * size, total), min((index + 1) * size, total)
    found, end = [], 0
    for run in runs:
        low, high = max(first, end), min(last, end + run.length)
        if low < high:
            found.append(_Run(run.start + low - end, high - low, 0))
        end += run.length
    return found


def _renumbered(runs: "itertools.chain[_Run]") -> list[_Run]:
    """Runs one after the other in the local tensor; neighbours are merged."""
    found: list[_Run] = []
    at = 0
    for run in runs:
        if found and found[-1].start + found[-1].length == run.start:
            found[-1] = found[-1]._replace(length=found[-1].length + run.length)
        else:
            found.append(_Run(run.start, run.length, at))
        at += run.length
    return found


def _flatten(runs_by_dim: list[list[_Run]], sizes: tuple[int, ...]) -> list[_Run]:
    """Runs of several dims as runs of their flattened product."""
    flat, size, local_size = [_Run(0, 1, 0)], 1, 1
    for runs, outer in zip(reversed(runs_by_dim), reversed(sizes), strict=True):
        if flat == [_Run(0, size, 0)]:
            flat = [_Run(run.start * size, run.length * size, run.at * size) for run in runs]
        else:
            flat = [
                _Run((run.start + index) * size + inner.start, inner.length, (run.at + index) * local_size + inner.at)
                for run in runs
                for index in range(run.length)
                for inner in flat
            ]
        size *= outer
        local_size *= sum(run.length for run in runs)
    return flat


def intersect(held: tuple[Piece, ...], region: tuple[Piece, ...]) -> tuple[Segment, ...]:
    """What the pieces of a rank and the region of a matrix have in common, in the order of the local tensor."""
    segments = []
    for piece in held:
        for part in region:
            row = max(piece.row, part.row)
            column = max(piece.column, part.column)
            num_rows = min(piece.row + piece.num_rows, part.row + part.num_rows) - row
            num_columns = min(piece.column + piece.num_columns, part.column + part.num_columns) - column
            if num_rows > 0 and num_columns > 0:
                segments.append(
                    Segment(
                        num_rows,
                        num_columns,
                        piece.at_row + row - piece.row,
                        piece.at_column + column - piece.column,
                        part.at_row + row - part.row,
                        part.at_column + column - part.column,
                    )
                )
    return tuple(segments)


def segments(layout: Layout, region: tuple[Piece, ...], rank: int) -> tuple[Segment, ...]:
    """The rectangles of the region that ``rank`` holds. Matrices that lie alike share them."""
    return _segments(layout, region, layout._shard_coordinates(rank))


@lru_cache(maxsize=4096)
def _segments(layout: Layout, region: tuple[Piece, ...], coordinates: tuple[int, ...]) -> tuple[Segment, ...]:
    return intersect(_pieces(layout, coordinates), region)


class Held(NamedTuple):
    """What the ranks hold of one region; arrays are cached and read-only, ``[world_size]`` each."""

    elements: NDArray[np.int64]
    replica: NDArray[np.int64]
    """A number for each copy of the parameter that ranks hold together."""
    rows: NDArray[np.int64]
    """Stored rows of all its rectangles together; a row that lies in two of them counts twice."""
    columns: NDArray[np.int64]
    """Stored columns, likewise."""


@lru_cache(maxsize=4096)
def held(layout: Layout, region: tuple[Piece, ...]) -> Held:
    """How much of the region each rank holds, and as part of which copy."""
    by_coordinates: dict[tuple[int, ...], tuple[int, int, int]] = {}
    numbers: dict[tuple[int, ...], int] = {}
    elements, replica, rows, columns = np.zeros((4, layout.world_size), dtype=np.int64)
    for rank in range(layout.world_size):
        coordinates = layout._shard_coordinates(rank)
        if coordinates not in by_coordinates:
            found = intersect(_pieces(layout, coordinates), region)
            by_coordinates[coordinates] = (
                sum(segment.num_elements for segment in found),
                sum(segment.num_rows for segment in found),
                sum(segment.num_columns for segment in found),
            )
        elements[rank], rows[rank], columns[rank] = by_coordinates[coordinates]
        replica[rank] = numbers.setdefault(layout.replica(rank), len(numbers))
    arrays = Held(elements, replica, rows, columns)
    for array in arrays:
        array.setflags(write=False)
    return arrays
