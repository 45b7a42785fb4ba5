"""Which rectangles of a stored parameter each rank holds, as pure data.

A parameter of any number of dims is looked at as a matrix: leading dims flattened into rows, the last dim as columns. So is the
local tensor of a rank. A layout says, for each rank, which rectangles of the one lie where in the other.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Piece(NamedTuple):
    """A rectangle of a stored parameter, and where it lies in a second array (a rank's local tensor, or a matrix)."""

    row: int
    column: int
    num_rows: int
    num_columns: int
    at_row: int
    at_column: int

    @property
    def num_elements(self) -> int:
        """How many elements the rectangle has."""
        return self.num_rows * self.num_columns


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


@dataclass(frozen=True)
class Layout:
    """How one parameter lies on the ranks of a one-axis mesh.

    ``shard``: cut along tensor dim 0 like ``torch.chunk`` (``Shard(0)`` of a DTensor), last shards shorter or empty.
    ``replicate``: whole on every rank, with equal gradients (plain tensors in one process, or under DDP).
    """

    shape: tuple[int, ...]
    world_size: int
    kind: Literal["shard", "replicate"]

    @property
    def num_rows(self) -> int:
        """Rows of the parameter looked at as a matrix."""
        return math.prod(self.shape[:-1])

    @property
    def num_columns(self) -> int:
        """Columns of the parameter looked at as a matrix."""
        return self.shape[-1]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The rectangles that ``rank`` holds, with their places in its local tensor; none when its shard is empty."""
        first, last = self._row_bounds(rank)
        if first == last or self.num_columns == 0:
            return ()
        return (Piece(first, 0, last - first, self.num_columns, 0, 0),)

    def _row_bounds(self, rank: int) -> tuple[int, int]:
        if self.kind == "replicate":
            return 0, self.num_rows
        length = self.shape[0]
        rows_of_one = math.prod(self.shape[1:-1]) if len(self.shape) > 1 else 1
        chunk = -(-length // self.world_size)
        return min(rank * chunk, length) * rows_of_one, min((rank + 1) * chunk, length) * rows_of_one


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


@lru_cache(maxsize=4096)
def held_elements(layout: Layout, region: tuple[Piece, ...]) -> NDArray[np.int64]:
    """``[world_size]`` int64: how many elements of the region each rank holds. The array is cached and read-only."""
    held = np.array(
        [sum(segment.num_elements for segment in intersect(layout.pieces(rank), region)) for rank in range(layout.world_size)],
        dtype=np.int64,
    )
    held.setflags(write=False)
    return held
