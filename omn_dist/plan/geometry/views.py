"""Views: which regions of a stored parameter are matrices, and which rows belong to none."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, get_args

from omn_dist.plan.geometry.layout import Layout, Region
from omn_dist.plan.geometry.matrix import Matrix

SplitAlgorithm = Literal["muon", "adamw"]
_IS_MATRIX: Mapping[SplitAlgorithm, bool] = {"muon": True, "adamw": False}
"""Whether the rows of a split are a matrix, by what ``split_algorithms`` says of them."""


class RowSet(NamedTuple):
    """Rows of the operator that belong together: a matrix, or rows that AdamW updates."""

    label: str
    """Index on each axis that is not joined, then the split: ``"3.k"``; empty for a single set."""
    is_matrix: bool
    intervals: tuple[tuple[int, int], ...]
    """First row and number of rows of each interval, in the order of the matrix's rows."""

    @property
    def num_rows(self) -> int:
        """Rows of all intervals together."""
        return sum(length for _, length in self.intervals)


@dataclass(frozen=True, kw_only=True)
class View:
    """How the operator stored in one parameter splits into matrices.

    ``shape`` is ``(*axes, rows, columns)``, with outputs in rows: the axes number groups of
    ``rows`` consecutive rows of the operator. By default each group is a matrix: ``(2, I, C)``
    holds a gate and an up projection, ``(3, H, D, C)`` the heads of fused queries, keys and values.
    ``split_sizes`` split the rows of every group further: ``(H, D + Dv, R)`` with ``(D, Dv)`` holds
    the key and the value rows of each head.

    Raises:
        ValueError: sizes that do not fit together, with the numbers.
    """

    shape: tuple[int, ...]
    split_sizes: tuple[int, ...] = ()
    """Rows of each split of a group; empty: one split."""
    split_names: tuple[str, ...] = ()
    """One for each split, for the names of matrices; empty: numbers."""
    split_algorithms: tuple[SplitAlgorithm, ...] = ()
    """One for each split; AdamW updates the rows of ``"adamw"``. Empty: all are matrices."""
    joined_axes: tuple[int, ...] = ()
    """Axes of ``shape`` whose groups of rows are stacked into one matrix.

    ``(H, 3, D, C)`` with axis 0 joined holds the whole query, key and value projections of a model
    that stores them head by head.
    """
    transposed: bool = False
    """Whether the parameter stores the transpose: its last two dims are inputs x outputs."""

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
        if any(algorithm not in get_args(SplitAlgorithm) for algorithm in self.split_algorithms):
            raise ValueError(f"muon_split_algorithms: found {self.split_algorithms}, expected 'muon' or 'adamw' for each split")
        if not any(self.split_is_matrix):
            raise ValueError("muon_split_algorithms: found no split on muon, expected one; put the whole parameter on adamw")
        axes = range(len(self.shape) - 2)
        if tuple(sorted(set(self.joined_axes))) != self.joined_axes or any(axis not in axes for axis in self.joined_axes):
            raise ValueError(
                f"muon_joined_axes: found {self.joined_axes}, expected ascending axes of muon_shape {self.shape} before its rows"
            )

    @property
    def split_is_matrix(self) -> tuple[bool, ...]:
        """Whether the rows of each split are a matrix (or one in each group of rows)."""
        if self.split_algorithms:
            return tuple(_IS_MATRIX[algorithm] for algorithm in self.split_algorithms)
        return (True,) * max(len(self.split_sizes), 1)

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> Self | None:
        """The view in the fields of a parameter group; ``None`` without ``muon_shape``."""
        if group.get("muon_shape") is None:
            return None
        values: dict[str, Any] = {
            field.removeprefix("muon_"): tuple(group[field]) if isinstance(group[field], list) else group[field]
            for field in VIEW_FIELDS
            if group.get(field) is not None
        }
        return cls(**values)

    def as_fields(self) -> dict[str, Any]:
        """The fields of a parameter group: JSON types, without those that have their default."""
        values = {field: getattr(self, field.removeprefix("muon_")) for field in VIEW_FIELDS}
        return {field: value for field, value in values.items() if value not in ((), False)}

    def check(self, name: str, stored_shape: Sequence[int]) -> None:
        """Raise ``ValueError`` unless ``stored_shape`` holds exactly this operator."""
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
    def row_sets(self) -> tuple[RowSet, ...]:
        """All sets of rows, matrices and others, by the axes that are not joined, then by split."""
        *axes, num_rows, _ = self.shape
        sizes = self.split_sizes or (num_rows,)
        names = self.split_names or tuple(map(str, range(len(sizes))))
        offsets = itertools.accumulate(sizes, initial=0)
        splits = list(zip(names, self.split_is_matrix, sizes, offsets, strict=False))
        strides = [math.prod(self.shape[axis + 1 : -1]) for axis in range(len(axes))]
        apart = [axis for axis in range(len(axes)) if axis not in self.joined_axes]
        starts = [
            sum(index * strides[axis] for index, axis in zip(joined, self.joined_axes, strict=True))
            for joined in itertools.product(*(range(axes[axis]) for axis in self.joined_axes))
        ]
        found = []
        for indices in itertools.product(*(range(axes[axis]) for axis in apart)):
            first = sum(index * strides[axis] for index, axis in zip(indices, apart, strict=True))
            for name, is_matrix, size, offset in splits:
                label = [*map(str, indices), *([name] if self.split_sizes or self.split_names else [])]
                intervals = _merged((first + start + offset, size) for start in starts)
                found.append(RowSet(".".join(label), is_matrix, intervals))
        return tuple(found) if len(found) > 1 else (found[0]._replace(label=""),)

    def __str__(self) -> str:
        """One short line: ``(4, 48, 64) q 16, k 16, v 16; axes 0 joined; transposed``."""
        text = f"({', '.join(map(str, self.shape))})"
        if self.split_sizes:
            names = self.split_names or tuple("" for _ in self.split_sizes)
            text += " " + ", ".join(
                f"{name} {size}".strip() + ("" if is_matrix else " on AdamW")
                for name, size, is_matrix in zip(names, self.split_sizes, self.split_is_matrix, strict=True)
            )
        if self.joined_axes:
            text += f"; axes {', '.join(map(str, self.joined_axes))} joined"
        return text + ("; transposed" if self.transposed else "")

    @property
    def has_adamw_rows(self) -> bool:
        """Whether some rows belong to no matrix."""
        return not all(self.split_is_matrix)

    @property
    def num_matrices(self) -> int:
        """Matrices in one parameter."""
        return sum(row_set.is_matrix for row_set in self.row_sets)

    @property
    def num_adamw_elements(self) -> int:
        """Elements of one parameter that AdamW updates."""
        return self.shape[-1] * sum(row_set.num_rows for row_set in self.row_sets if not row_set.is_matrix)

    def matrices(self, name: str, layout: Layout) -> list[Matrix]:
        """The matrices of the parameter ``name``; the shape of ``layout`` passes :meth:`check`."""
        num_columns = self.shape[-1]
        return [
            Matrix(
                f"{name}[{row_set.label}]" if row_set.label else name,
                name,
                *((num_columns, row_set.num_rows) if self.transposed else (row_set.num_rows, num_columns)),
                self._region(row_set.intervals, layout),
                layout,
                self.transposed,
            )
            for row_set in self.row_sets
            if row_set.is_matrix
        ]

    def adamw_region(self, layout: Layout) -> tuple[Region, ...]:
        """The regions of the stored parameter that AdamW updates."""
        return self._region(
            [interval for row_set in self.row_sets if not row_set.is_matrix for interval in row_set.intervals], layout
        )

    def _region(self, intervals: Sequence[tuple[int, int]], layout: Layout) -> tuple[Region, ...]:
        """Intervals of the operator's rows, stacked in order, as regions of the parameter."""
        stored, num_columns = layout.shape, self.shape[-1]
        if not self.transposed:
            # A row of a convolution's operator takes several stored rows.
            stored_rows_a_row = num_columns // stored[-1]
            if stored_rows_a_row == 1:
                return tuple(Region(row, 0, length, num_columns, at, 0) for row, length, at in _stacked(intervals))
            return tuple(
                Region((row + index) * stored_rows_a_row + stored_row, 0, 1, stored[-1], at + index, stored_row * stored[-1])
                for row, length, at in _stacked(intervals)
                for index in range(length)
                for stored_row in range(stored_rows_a_row)
            )
        regions = []
        num_outputs = stored[-1]
        for row, length, at in _stacked(intervals):
            # An interval may continue in the next stored matrix of a stack.
            while length:
                stack, output = divmod(row, num_outputs)
                count = min(length, num_outputs - output)
                regions.append(Region(stack * num_columns, output, num_columns, count, 0, at))
                row, at, length = row + count, at + count, length - count
        return tuple(regions)


VIEW_FIELDS = (
    "muon_shape",
    "muon_split_sizes",
    "muon_split_names",
    "muon_split_algorithms",
    "muon_joined_axes",
    "muon_transposed",
)
"""Fields of a parameter group with its view: those of :class:`View` with ``muon_`` before them."""


def matrices_of(name: str, view: View | None, layout: Layout) -> list[Matrix]:
    """The matrices of one parameter, without work; one matrix where there is no view.

    Raises:
        ValueError: a shape that the view does not fit, or without a view one that has not two dims.
    """
    if view is not None:
        view.check(name, layout.shape)
        return view.matrices(name, layout)
    if len(layout.shape) != 2:
        raise ValueError(
            f"parameter {name}: found shape {layout.shape} in a group on muon, expected a matrix; put it on adamw, or give "
            "muon_shape for a stack of matrices"
        )
    return [Matrix.whole(name, layout)]


def _are_positive(sizes: Sequence[int]) -> bool:
    return all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)


def _num_row_dims(stored: tuple[int, ...], num_rows: int, num_columns: int) -> int | None:
    """How many leading dims make up the rows; ``None`` where no number does."""
    for count in range(1, len(stored)):
        if (math.prod(stored[:count]), math.prod(stored[count:])) == (num_rows, num_columns):
            return count
    return None


def _merged(intervals: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The intervals, adjacent ones merged."""
    found: list[tuple[int, int]] = []
    for row, length in intervals:
        if found and sum(found[-1]) == row:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((row, length))
    return tuple(found)


def _stacked(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """First row, length and position of each interval when they are stacked in this order."""
    positions = itertools.accumulate((length for _, length in intervals), initial=0)
    return [(row, length, at) for (row, length), at in zip(intervals, positions, strict=False)]
