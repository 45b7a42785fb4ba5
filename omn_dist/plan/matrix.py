"""The unit that is orthogonalised: one linear operator, as a region of a stored parameter."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from omn_dist.algorithms.newton_schulz import Recipe
from omn_dist.algorithms.row_numbers import NO_NUMBERS, NUMBER_BYTES, ROW_NUMBERS, RowNumbers
from omn_dist.plan.cost import CostForm, cost_form, newton_schulz_flops, slice_bytes, slice_collectives, slice_flops
from omn_dist.plan.layout import Held, Layout, Piece, Segment, held, segments

FLAG_BYTES = 4
"""Each message says for each of its matrices, in one fp32 number, whether there is a gradient."""
MESSAGE_ALIGNMENT = 4
"""Bytes to which what a message says of one matrix is rounded up, so that numbers of any dtype in it are aligned."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Which part of a whole matrix a team's member works on: its long side is cut into ``size`` parts."""

    whole: str
    """Name of the whole matrix."""
    index: int
    size: int
    stored_rows: int
    """Of the whole matrix."""
    stored_columns: int

    @property
    def cuts_rows(self) -> bool:
        """Whether stored rows are the long side."""
        return self.stored_rows >= self.stored_columns


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix: where it lies in its parameter, how that is sharded, and what its Newton-Schulz costs.

    Or a slice of one: it moves like a matrix of its own, and its owner transforms it together with those of the other slices.
    """

    name: str
    parameter_name: str
    stored_rows: int
    """Rows as stored: outputs, unless ``transposed``."""
    stored_columns: int
    region: tuple[Piece, ...]
    layout: Layout
    num_steps: int
    """Newton-Schulz iterations, for the cost."""
    transposed: bool = False
    """Whether the operator is the transpose of what is stored (inputs in rows, as in GPT-2's Conv1D)."""
    form: CostForm = "standard"
    """Form of Newton-Schulz, for the cost."""
    row_numbers: RowNumbers = NO_NUMBERS
    """Numbers of its algorithm that ride on its messages."""
    itemsize: int = 4
    """Bytes of an element of its Newton-Schulz."""
    whole_only: str = ""
    """Why no team can work on it; empty where one can."""
    slice: Slice | None = None
    """Of a slice: which one."""

    @classmethod
    def whole(cls, name: str, layout: Layout, num_steps: int) -> Self:
        """The matrix that is a whole stored parameter of two dims."""
        num_rows, num_columns = layout.shape
        return cls(name, name, num_rows, num_columns, _whole_region(num_rows, num_columns), layout, num_steps)

    def worked_by(self, algorithm: str, recipe: Recipe, guards: Sequence[str] = ()) -> Self:
        """This matrix with the cost and the message numbers of an algorithm, its Newton-Schulz and what guards its updates."""
        form = cost_form(recipe, self.stored_rows, self.stored_columns)
        return replace(
            self,
            num_steps=recipe.schedule.num_steps,
            form=form,
            row_numbers=ROW_NUMBERS[algorithm],
            itemsize=recipe.dtype.itemsize,
            whole_only=whole_only(algorithm, form, guards),
        )

    @property
    def work(self) -> str:
        """What its owner does, in words, for the plan's description."""
        numbers = f", row numbers {list(self.row_numbers)}" if any(self.row_numbers) else ""
        part = f", slice {self.slice.index} of {self.slice.size} of {self.slice.whole}" if self.slice is not None else ""
        return f"{self.num_steps} steps{'' if self.form == 'standard' else f' ({self.form})'}{numbers}{part}"

    @property
    def operator_shape(self) -> tuple[int, int]:
        """Outputs m and inputs n of the whole operator, for the scale."""
        whole = self if self.slice is None else self.slice
        shape = whole.stored_rows, whole.stored_columns
        return shape[::-1] if self.transposed else shape

    @property
    def num_rows(self) -> int:
        """Outputs of the operator, or those that a slice has a part of."""
        return self.stored_columns if self.transposed else self.stored_rows

    @property
    def num_columns(self) -> int:
        """Inputs of the operator, or those that a slice has a part of."""
        return self.stored_rows if self.transposed else self.stored_columns

    @property
    def num_elements(self) -> int:
        """Rows times columns."""
        return self.stored_rows * self.stored_columns

    @property
    def flops(self) -> int:
        """Estimated FLOPs of its Newton-Schulz at the owner; of a vector, which has no steps, those of its norm and division."""
        if self.num_steps == 0:
            return 3 * self.num_elements
        if self.slice is not None:
            return slice_flops(*self.slice_sides, self.num_steps, self.slice.size, self.form)
        return newton_schulz_flops(self.stored_rows, self.stored_columns, self.num_steps, self.form)

    @property
    def slice_sides(self) -> tuple[int, int]:
        """Of a slice: the short side of the whole matrix, and its own part of the long side."""
        assert self.slice is not None, "only a slice has a width"
        return (self.stored_columns, self.stored_rows) if self.slice.cuts_rows else (self.stored_rows, self.stored_columns)

    @property
    def team_bytes(self) -> int:
        """Bytes that the owner of a slice sends to the others of its team in one step; 0 for a whole matrix."""
        if self.slice is None:
            return 0
        return slice_bytes(self.slice_sides[0], self.num_steps, self.slice.size, self.form, self.itemsize)

    @property
    def team_collectives(self) -> int:
        """Collectives of the team of a slice in one step; 0 for a whole matrix."""
        return 0 if self.slice is None else slice_collectives(self.num_steps, self.form)

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The rectangles of this matrix that ``rank`` holds."""
        return segments(self.layout, self.region, rank)

    def segment_rows(self, segment: Segment) -> int:
        """Rows of the operator in a rectangle."""
        return segment.num_columns if self.transposed else segment.num_rows

    @property
    def stack_number_bytes(self) -> int:
        """Bytes of the row numbers of the whole matrix at its owner, both ways together."""
        numbers = self.row_numbers
        return NUMBER_BYTES * ((numbers.to_owner + numbers.to_shards) * self.num_rows + numbers.scalars)

    @property
    def held(self) -> Held:
        """How many elements each rank holds."""
        return held(self.layout, self.region)

    def candidates(self) -> tuple[int, ...]:
        """The ranks that may own it: those that hold all of it, so that it need not travel, or any rank if none does."""
        whole = np.flatnonzero(self.held.elements == self.num_elements)
        return tuple(int(rank) for rank in whole) if len(whole) else tuple(range(self.layout.world_size))

    def gather_bytes(self, owner: int, wire_itemsize: int) -> NDArray[np.int64]:
        """``[world_size]``: bytes that each rank sends to the owner: its part, a flag and the row numbers of its part.

        Only the owner's own copy of the parameter is gathered.
        """
        copy = self.held.replica
        message: NDArray[np.int64] = np.where(copy == copy[owner], self.gather_messages(wire_itemsize), 0)
        message[owner] = 0
        return message

    def scatter_bytes(self, owner: int, wire_itemsize: int) -> NDArray[np.int64]:
        """``[world_size]``: bytes that the owner sends back to each rank, of all copies."""
        message = self.scatter_messages(wire_itemsize)
        message[owner] = 0
        return message

    def gather_messages(self, wire_itemsize: int) -> NDArray[np.int64]:
        """``[world_size]``: bytes of the message about each rank's part on its way to an owner elsewhere."""
        return self._messages(self.row_numbers.to_owner * self._rows_held, wire_itemsize)

    def scatter_messages(self, wire_itemsize: int) -> NDArray[np.int64]:
        """``[world_size]``: bytes of the message about each rank's part on its way back."""
        return self._messages(self.row_numbers.to_shards * self._rows_held + self.row_numbers.scalars, wire_itemsize)

    def stack_bytes(self, wire_itemsize: int) -> int:
        """Bytes of the whole matrix at its owner, with its row numbers."""
        return self.num_elements * wire_itemsize + self.stack_number_bytes

    @property
    def _rows_held(self) -> NDArray[np.int64]:
        return self.held.columns if self.transposed else self.held.rows

    def _messages(self, numbers: NDArray[np.int64], wire_itemsize: int) -> NDArray[np.int64]:
        elements = self.held.elements
        payload = -(-elements * wire_itemsize // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT
        return np.where(elements > 0, payload + FLAG_BYTES + NUMBER_BYTES * numbers, 0)


@lru_cache(maxsize=4096)
def _whole_region(num_rows: int, num_columns: int) -> tuple[Piece, ...]:
    """All of a parameter. Matrices that lie alike share it."""
    return (Piece(0, 0, num_rows, num_columns, 0, 0),)


def whole_only(algorithm: str, form: CostForm, guards: Sequence[str]) -> str:
    """Why a team cannot do such an update: what needs more of the whole matrix than Gram matrices. Empty where it can."""
    if algorithm != "muon":
        return f"algorithm {algorithm}"
    if form == "gram":
        return "the Gram form"
    if form.startswith("symmetric"):
        return "the symmetric form"
    return guards[0] if guards else ""
