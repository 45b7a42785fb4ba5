"""The unit that is orthogonalised: one linear operator, as a region of a stored parameter."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from omn_dist.plan.cost import newton_schulz_flops
from omn_dist.plan.layout import Layout, Piece, Segment, held_elements, intersect


@dataclass(frozen=True)
class Matrix:
    """One matrix: its name, its shape (m outputs, n inputs), where it lies in its parameter, and how that is sharded."""

    name: str
    parameter_name: str
    num_rows: int
    num_columns: int
    region: tuple[Piece, ...]
    layout: Layout
    num_steps: int
    """Newton-Schulz iterations, for the cost."""

    @classmethod
    def whole(cls, name: str, layout: Layout, num_steps: int) -> Self:
        """The matrix that is a whole stored parameter of two dims."""
        num_rows, num_columns = layout.shape
        region = (Piece(0, 0, num_rows, num_columns, 0, 0),)
        return cls(name, name, num_rows, num_columns, region, layout, num_steps)

    @property
    def num_elements(self) -> int:
        """Rows times columns."""
        return self.num_rows * self.num_columns

    @property
    def flops(self) -> int:
        """Estimated FLOPs of its Newton-Schulz at the owner."""
        return newton_schulz_flops(self.num_rows, self.num_columns, self.num_steps)

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The rectangles of this matrix that ``rank`` holds."""
        return intersect(self.layout.pieces(rank), self.region)

    def held_elements(self) -> NDArray[np.int64]:
        """``[world_size]``: elements of this matrix on each rank."""
        return held_elements(self.layout, self.region)

    def message_elements(self) -> NDArray[np.int64]:
        """``[world_size]``: wire elements of each rank's message about this matrix: its part and a flag, if it has a part."""
        held = self.held_elements()
        return held + (held > 0)
