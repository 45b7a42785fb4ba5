"""The unit that is orthogonalised: one linear operator, as regions of a stored parameter."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from omn_dist.algorithms.newton_schulz import Recipe
from omn_dist.plan.geometry.flops import CostForm, cost_form, newton_schulz_flops, slice_bytes, slice_collectives, slice_flops
from omn_dist.plan.geometry.layout import Holdings, Layout, Region, ShardRegion, holdings, shard_regions

FLAG_BYTES = 4
"""A message has one fp32 number for each of its matrices: whether the sender has a gradient."""
NUMBER_BYTES = 4
"""Row numbers are fp32, whatever the communication dtype is."""
MESSAGE_ALIGNMENT = 4
"""The elements of a matrix in a message are padded to a multiple of this many bytes."""


class RowNumbers(NamedTuple):
    """How many fp32 numbers an update rule adds to the messages of one matrix.

    They need no collective of their own. Rows are those of the operator: outputs.
    """

    to_owner: int = 0
    """A row, from a shard to the owner. Shards that hold parts of one row send equal numbers."""
    to_shards: int = 0
    """A row, from the owner to every shard that holds elements of the row."""
    scalars: int = 0
    """A matrix, from the owner to every shard."""


NO_NUMBERS = RowNumbers()


@dataclass(frozen=True, slots=True)
class Work:
    """What the owner of a matrix does in a step, as far as plan, messages and cost depend on it.

    The update rule of the matrix states it.
    """

    ns_steps: int = 0
    """Newton-Schulz iterations; 0 for a vector, which is divided by its norm only."""
    form: CostForm = "standard"
    """Form of the iteration."""
    itemsize: int = 4
    """Bytes of an element of the iteration."""
    row_numbers: RowNumbers = NO_NUMBERS
    """Numbers of the rule in the messages of the matrix."""
    whole_only: str = ""
    """What no team of ranks can compute, as a noun phrase for messages; else empty."""

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, num_rows: int, num_columns: int, *, row_numbers: RowNumbers = NO_NUMBERS, whole_only: str = ""
    ) -> "Work":
        """The work of a Newton-Schulz recipe on a matrix of this shape.

        The Gram form needs one owner: it sets ``whole_only`` where that is not given.
        """
        form = cost_form(recipe, num_rows, num_columns)
        whole_only = whole_only or ("the Gram form" if form == "gram" else "")
        return _shared(cls(recipe.schedule.ns_steps, form, recipe.dtype.itemsize, row_numbers, whole_only))

    def __str__(self) -> str:
        numbers = f", row numbers {list(self.row_numbers)}" if any(self.row_numbers) else ""
        return f"{self.ns_steps} steps{'' if self.form == 'standard' else f' ({self.form})'}{numbers}"


@dataclass(frozen=True, slots=True)
class TeamSlice:
    """One of the ``size`` slices of a matrix, cut along its long side for a team of ranks."""

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

    def __str__(self) -> str:
        return f"slice {self.index} of {self.size} of {self.whole}"


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix, or a slice of one: its regions of a parameter, their layout, its owner's work.

    A slice is moved like a matrix. The owners of all slices transform the matrix together.
    """

    name: str
    parameter_name: str
    stored_rows: int
    """Rows as stored: outputs, unless ``transposed``."""
    stored_columns: int
    region: tuple[Region, ...]
    """Where its elements are in the parameter."""
    layout: Layout
    """How the parameter is sharded."""
    transposed: bool = False
    """Whether the operator is the transpose of what is stored, as in GPT-2's Conv1D."""
    work: Work = Work()
    slice: TeamSlice | None = None
    """``None`` for a whole matrix."""

    @classmethod
    def whole(cls, name: str, layout: Layout) -> Self:
        """The matrix that is a whole stored parameter of two dims."""
        num_rows, num_columns = layout.shape
        return cls(name, name, num_rows, num_columns, _whole_region(num_rows, num_columns), layout)

    def with_work(self, work: Work) -> Self:
        """This matrix with the work of its owner."""
        return replace(self, work=work)

    @property
    def whole_name(self) -> str:
        """Its own name, or that of the whole matrix of a slice."""
        return self.name if self.slice is None else self.slice.whole

    @property
    def operator_shape(self) -> tuple[int, int]:
        """Outputs m and inputs n of the whole operator, for the scale."""
        whole = self if self.slice is None else self.slice
        shape = whole.stored_rows, whole.stored_columns
        return shape[::-1] if self.transposed else shape

    @property
    def num_rows(self) -> int:
        """Outputs of the operator that it has elements of."""
        return self.stored_columns if self.transposed else self.stored_rows

    @property
    def num_columns(self) -> int:
        """Inputs of the operator that it has elements of."""
        return self.stored_rows if self.transposed else self.stored_columns

    @property
    def num_elements(self) -> int:
        """Rows times columns."""
        return self.stored_rows * self.stored_columns

    @property
    def flops(self) -> int:
        """Estimated FLOPs of the owner's Newton-Schulz; of a vector, of its norm and division."""
        if self.work.ns_steps == 0:
            return 3 * self.num_elements
        if self.slice is not None:
            return slice_flops(*self.slice_sides, self.work.ns_steps, self.slice.size, self.work.form)
        return newton_schulz_flops(self.stored_rows, self.stored_columns, self.work.ns_steps, self.work.form)

    @property
    def slice_sides(self) -> tuple[int, int]:
        """Of a slice: the short side of the whole matrix, and its own width along the long side."""
        assert self.slice is not None, "only a slice has a width"
        return (self.stored_columns, self.stored_rows) if self.slice.cuts_rows else (self.stored_rows, self.stored_columns)

    @property
    def team_bytes(self) -> int:
        """Bytes that a slice's owner sends to its team in one step; 0 for a whole matrix."""
        if self.slice is None:
            return 0
        return slice_bytes(self.slice_sides[0], self.work.ns_steps, self.slice.size, self.work.form, self.work.itemsize)

    @property
    def team_collectives(self) -> int:
        """Collectives of the team of a slice in one step; 0 for a whole matrix."""
        return 0 if self.slice is None else slice_collectives(self.work.ns_steps, self.work.form)

    def shard_regions(self, rank: int) -> tuple[ShardRegion, ...]:
        """The regions of this matrix that ``rank`` holds."""
        return shard_regions(self.layout, self.region, rank)

    def region_rows(self, region: ShardRegion) -> int:
        """Rows of the operator in a region."""
        return region.num_columns if self.transposed else region.num_rows

    @property
    def holdings(self) -> Holdings:
        """How many of its elements each rank holds."""
        return holdings(self.layout, self.region)

    def candidates(self) -> tuple[int, ...]:
        """The ranks that may own it: those that hold all of it if there are any, else all."""
        whole = np.flatnonzero(self.holdings.elements == self.num_elements)
        return tuple(int(rank) for rank in whole) if len(whole) else tuple(range(self.layout.world_size))

    def gather_bytes(self, communication_itemsize: int) -> NDArray[np.int64]:
        """``[world_size]``: bytes of each rank's message to an owner elsewhere.

        A message holds the rank's elements, one flag and the row numbers.
        """
        return self._message_bytes(self.work.row_numbers.to_owner * self._rows_held, communication_itemsize)

    def scatter_bytes(self, communication_itemsize: int) -> NDArray[np.int64]:
        """``[world_size]``: bytes of the message to each rank from an owner elsewhere."""
        numbers = self.work.row_numbers
        return self._message_bytes(numbers.to_shards * self._rows_held + numbers.scalars, communication_itemsize)

    def stack_bytes(self, communication_itemsize: int) -> int:
        """Bytes of the whole matrix at its owner, with its row numbers."""
        return self.num_elements * communication_itemsize + self.stack_number_bytes

    @property
    def stack_number_bytes(self) -> int:
        """Bytes of the row numbers of the whole matrix at its owner: received and returned."""
        numbers = self.work.row_numbers
        return NUMBER_BYTES * ((numbers.to_owner + numbers.to_shards) * self.num_rows + numbers.scalars)

    @property
    def _rows_held(self) -> NDArray[np.int64]:
        return self.holdings.columns if self.transposed else self.holdings.rows

    def _message_bytes(self, numbers: NDArray[np.int64], communication_itemsize: int) -> NDArray[np.int64]:
        elements = self.holdings.elements
        payload = -(-elements * communication_itemsize // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT
        return np.where(elements > 0, payload + FLAG_BYTES + NUMBER_BYTES * numbers, 0)


@lru_cache(maxsize=4096)
def _whole_region(num_rows: int, num_columns: int) -> tuple[Region, ...]:
    """All of a parameter. Matrices of one shape share it."""
    return (Region(0, 0, num_rows, num_columns, 0, 0),)


@lru_cache(maxsize=4096)
def _shared(work: Work) -> Work:
    """One object for all equal ones, of which a model has many."""
    return work
