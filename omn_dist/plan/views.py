"""Views: which rectangles of a stored parameter are matrices, and which rows of it are none. Pure data and arithmetic."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from omn_dist.plan.layout import Layout, Piece
from omn_dist.plan.matrix import Matrix

SplitAlgorithm = Literal["muon", "adamw"]


class Block(NamedTuple):
    """Rows of the operator that belong together: one matrix, or rows that AdamW updates."""

    label: str
    """Index of each axis that is not joined, then the split: ``"3.k"``; empty when the parameter holds nothing else."""
    algorithm: SplitAlgorithm
    runs: tuple[tuple[int, int], ...]
    """First row and number of rows of each interval, in the order in which the matrix stacks them."""

    @property
    def num_rows(self) -> int:
        """Rows of all intervals."""
        return sum(length for _, length in self.runs)


@dataclass(frozen=True, kw_only=True)
class View:
    """How the operator that is stored in one parameter splits into matrices.

    ``shape`` is ``(*axes, rows, columns)`` with outputs in rows: the operator's rows, all of them, are cut into ``axes`` equal
    blocks of ``rows`` each. Without anything else each block is a matrix: ``(2, I, C)`` are a gate and an up projection,
    ``(3, H, D, C)`` are the heads of fused queries, keys and values. ``split_sizes`` cut the rows of each block further:
    ``(H, D + Dv, R)`` with ``(D, Dv)`` are the key and the value rows of each head.

    Raises:
        ValueError: sizes that cannot be, with the numbers.
    """

    shape: tuple[int, ...]
    split_sizes: tuple[int, ...] = ()
    """Rows of each part of a block; empty: one part."""
    split_names: tuple[str, ...] = ()
    """One for each split, for the names of matrices; empty: numbers."""
    split_algorithms: tuple[SplitAlgorithm, ...] = ()
    """One for each split: rows on ``"adamw"`` are no matrix and are updated by AdamW inside the parameter. Empty: all Muon."""
    joined_axes: tuple[int, ...] = ()
    """Axes of ``shape`` whose blocks are stacked into one matrix instead of being matrices of their own: ``(H, 3, D, C)`` with
    axis 0 joined are the whole query, key and value projections that a model stores head by head."""
    transposed: bool = False
    """Whether the parameter stores the transpose of the operator (its last two dims are inputs x outputs)."""

    def __post_init__(self) -> None:
        if len(self.shape) < 2 or not _are_positive(self.shape):
            raise ValueError(f"muon_shape: found {self.shape}, expected at least two positive integers (..., rows, columns)")
        if self.split_sizes and not _are_positive(self.split_sizes):
            raise ValueError(f"muon_split_sizes: found {self.split_sizes}, expected positive integers")
        if self.split_sizes and sum(self.split_sizes) != self.shape[-2]:
            raise ValueError(
                f"muon_split_sizes: found {self.split_sizes} with sum {sum(self.split_sizes)}, expected the sum {self.shape[-2]} "
                f"of the rows in muon_shape {self.shape}"
            )
        num_splits = max(len(self.split_sizes), 1)
        for field, values in (("names", self.split_names), ("algorithms", self.split_algorithms)):
            if values and len(values) != num_splits:
                raise ValueError(f"muon_split_{field}: found {values}, expected {num_splits} of them, one for each split")
        if len(set(self.split_names)) != len(self.split_names):
            raise ValueError(f"muon_split_names: found {self.split_names}, expected different names")
        if any(algorithm not in ("muon", "adamw") for algorithm in self.split_algorithms):
            raise ValueError(f"muon_split_algorithms: found {self.split_algorithms}, expected 'muon' or 'adamw' for each split")
        if self.split_algorithms and "muon" not in self.split_algorithms:
            raise ValueError("muon_split_algorithms: found no split on muon, expected one; put the whole parameter on adamw")
        axes = range(len(self.shape) - 2)
        if tuple(sorted(set(self.joined_axes))) != self.joined_axes or any(axis not in axes for axis in self.joined_axes):
            raise ValueError(
                f"muon_joined_axes: found {self.joined_axes}, expected ascending axes of muon_shape {self.shape} before its rows"
            )

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> Self | None:
        """The view that a parameter group's fields describe; ``None`` without ``muon_shape``."""
        if group.get("muon_shape") is None:
            return None
        values: dict[str, Any] = {
            field.removeprefix("muon_"): tuple(group[field]) if isinstance(group[field], list) else group[field]
            for field in VIEW_FIELDS
            if group.get(field) is not None
        }
        return cls(**values)

    def as_fields(self) -> dict[str, Any]:
        """The fields of a parameter group; only JSON types, and only what differs from the defaults."""
        values = {field: getattr(self, field.removeprefix("muon_")) for field in VIEW_FIELDS}
        return {field: value for field, value in values.items() if value not in ((), False)}

    def check(self, name: str, stored_shape: Sequence[int]) -> None:
        """Raise ``ValueError`` unless a parameter of ``stored_shape`` holds exactly this operator."""
        stored = tuple(stored_shape)
        num_rows, num_columns = math.prod(self.shape[:-1]), self.shape[-1]
        if self.transposed:
            fits = (
                len(stored) >= 2
                and stored[-2] == num_columns
                and math.prod(stored) == num_rows * num_columns
                and num_rows % stored[-1] == 0
            )
            expected = "(..., inputs, outputs) with the columns of muon_shape as inputs"
        else:
            fits = _num_row_dims(stored, num_rows, num_columns) is not None
            expected = "leading dims that make up the rows of muon_shape, and trailing dims that make up its columns"
        if not fits:
            raise ValueError(
                f"parameter {name}: found stored shape {stored} for muon_shape {self.shape}"
                f"{' (transposed)' if self.transposed else ''}, that is {num_rows} x {num_columns}; expected {expected}"
            )

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, matrices and others, in the order of their first row within axes that are not joined."""
        *axes, num_rows, _ = self.shape
        sizes = self.split_sizes or (num_rows,)
        muon: SplitAlgorithm = "muon"
        algorithms = self.split_algorithms or (muon,) * len(sizes)
        names = self.split_names or tuple(map(str, range(len(sizes))))
        offsets = itertools.accumulate(sizes, initial=0)
        splits = list(zip(names, algorithms, sizes, offsets, strict=False))
        strides = [math.prod(self.shape[axis + 1 : -1]) for axis in range(len(axes))]
        apart = [axis for axis in range(len(axes)) if axis not in self.joined_axes]
        starts = [
            sum(index * strides[axis] for index, axis in zip(joined, self.joined_axes, strict=True))
            for joined in itertools.product(*(range(axes[axis]) for axis in self.joined_axes))
        ]
        found = []
        for indices in itertools.product(*(range(axes[axis]) for axis in apart)):
            first = sum(index * strides[axis] for index, axis in zip(indices, apart, strict=True))
            for name, algorithm, size, offset in splits:
                parts = [*map(str, indices), *([name] if self.split_sizes or self.split_names else [])]
                runs = _merged((first + start + offset, size) for start in starts)
                found.append(Block(".".join(parts), algorithm, runs))
        return tuple(found) if len(found) > 1 else (found[0]._replace(label=""),)

    @property
    def has_adamw_rows(self) -> bool:
        """Whether some rows are no matrix."""
        return "adamw" in self.split_algorithms

    @property
    def num_matrices(self) -> int:
        """Matrices in one parameter."""
        return sum(block.algorithm == "muon" for block in self.blocks)

    @property
    def num_adamw_elements(self) -> int:
        """Elements of one parameter that AdamW updates."""
        return self.shape[-1] * sum(block.num_rows for block in self.blocks if block.algorithm == "adamw")

    def matrices(self, name: str, layout: Layout, num_steps: int) -> list[Matrix]:
        """The matrices of the parameter ``name``, which has the shape of ``layout`` and passes :meth:`check`."""
        num_columns = self.shape[-1]
        return [
            Matrix(
                f"{name}[{block.label}]" if block.label else name,
                name,
                *((num_columns, block.num_rows) if self.transposed else (block.num_rows, num_columns)),
                self._region(block.runs, layout),
                layout,
                num_steps,
                self.transposed,
            )
            for block in self.blocks
            if block.algorithm == "muon"
        ]

    def adamw_region(self, layout: Layout) -> tuple[Piece, ...]:
        """The rectangles of the stored parameter that AdamW updates."""
        return self._region([run for block in self.blocks if block.algorithm == "adamw" for run in block.runs], layout)

    def _region(self, runs: Sequence[tuple[int, int]], layout: Layout) -> tuple[Piece, ...]:
        """Rows of the operator, one run below the other, as rectangles of the parameter flattened to two dims."""
        stored, num_columns = layout.shape, self.shape[-1]
        if not self.transposed:
            # Dims between the rows and the last one, as in a convolution whose kernel is flattened into columns.
            row_pieces = num_columns // stored[-1]
            if row_pieces == 1:
                return tuple(Piece(row, 0, length, num_columns, at, 0) for row, length, at in _placed(runs))
            return tuple(
                Piece((row + index) * row_pieces + part, 0, 1, stored[-1], at + index, part * stored[-1])
                for row, length, at in _placed(runs)
                for index in range(length)
                for part in range(row_pieces)
            )
        pieces = []
        num_outputs = stored[-1]
        for row, length, at in _placed(runs):
            # A run may go on in the next stored stack.
            while length:
                stack, output = divmod(row, num_outputs)
                count = min(length, num_outputs - output)
                pieces.append(Piece(stack * num_columns, output, num_columns, count, 0, at))
                row, at, length = row + count, at + count, length - count
        return tuple(pieces)


VIEW_FIELDS = (
    "muon_shape",
    "muon_split_sizes",
    "muon_split_names",
    "muon_split_algorithms",
    "muon_joined_axes",
    "muon_transposed",
)
"""Fields of a parameter group that describe its view: those of :class:`View` with a prefix."""


def matrices_of(name: str, view: View | None, layout: Layout, num_steps: int) -> list[Matrix]:
    """The matrices of one parameter; without a view it is one itself and has two dims.

    Raises:
        ValueError: a shape that the view does not fit, or that is no matrix.
    """
    if view is not None:
        view.check(name, layout.shape)
        return view.matrices(name, layout, num_steps)
    if len(layout.shape) != 2:
        raise ValueError(
            f"parameter {name}: found shape {layout.shape} in a group on muon, expected a matrix; put it on adamw, or give "
            "muon_shape for a stack of matrices"
        )
    return [Matrix.whole(name, layout, num_steps)]


def _are_positive(sizes: Sequence[int]) -> bool:
    return all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)


def _num_row_dims(stored: tuple[int, ...], num_rows: int, num_columns: int) -> int | None:
    """How many leading dims make up the rows, or ``None``."""
    for count in range(1, len(stored)):
        if (math.prod(stored[:count]), math.prod(stored[count:])) == (num_rows, num_columns):
            return count
    return None


def _merged(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Runs with neighbours merged."""
    found: list[tuple[int, int]] = []
    for row, length in runs:
        if found and sum(found[-1]) == row:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((row, length))
    return tuple(found)


def _placed(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Row, length and place of each run, one below the other."""
    places = itertools.accumulate((length for _, length in runs), initial=0)
    return [(row, length, at) for (row, length), at in zip(runs, places, strict=False)]
