"""The interface between the pipeline and the update rules."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from omn_dist.algorithms.team_newton_schulz import Team
from omn_dist.exchange.numbers import Returned, StackNumbers
from omn_dist.plan.geometry.layout import ShardRegion


class IndexedRegion(NamedTuple):
    """A region of one of this rank's shards, and its matrix by its index in the plan."""

    matrix: int
    region: ShardRegion


class MatrixWork(Protocol):
    """What the pipeline calls in a step, on lists of regions or matrices.

    ``numbers`` are the row numbers that the plan gives each matrix. Most matrices have none: theirs
    are empty tensors.
    """

    def has_gradient(self, matrix: int) -> bool:
        """Whether this rank has a gradient for the parameter of the matrix."""
        ...

    def prepare(
        self, regions: Sequence[IndexedRegion], directions: Sequence[Tensor], numbers: Sequence[Tensor], *, commit: bool
    ) -> None:
        """Write the directions and row numbers of local regions.

        A missing gradient counts as zeros. With ``commit`` the call may also bring the state of the
        regions up to date, where this rank has a gradient. Without ``commit``, state does not
        change.
        """
        ...

    def commit(self, regions: Sequence[IndexedRegion]) -> None:
        """Bring the state of regions up to date that were prepared without ``commit``."""
        ...

    def transform(self, matrices: Sequence[int], stack: Tensor, numbers: Sequence[StackNumbers]) -> None:
        """Turn directions of whole matrices of one shape into their updates, in place.

        ``stack`` is ``[matrices, stored rows, stored columns]``.
        """
        ...

    def transform_slice(self, matrix: int, direction: Tensor, team: Team) -> None:
        """Turn the direction of a slice into its update, in place. Collective in the team.

        ``direction`` is ``[stored rows, stored columns]``.
        """
        ...

    def apply(
        self,
        regions: Sequence[IndexedRegion],
        updates: Sequence[Tensor],
        present: Sequence[Tensor | None],
        returned: Sequence[Returned],
    ) -> None:
        """Move the parameters of local regions by their updates.

        ``present`` is None where this rank has a gradient itself, else a scalar: 1 where some rank
        has one, 0 where none has and nothing may change.
        """
        ...
