"""What matrix algorithms add to the messages between shards and owners: fp32 numbers, next to directions and updates."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

MatrixAlgorithm = Literal["muon", "normuon"]
"""Algorithms of whole matrices."""
MATRIX_ALGORITHMS: tuple[str, ...] = get_args(MatrixAlgorithm)

NUMBER_BYTES = 4
"""Numbers are fp32 whatever the wire is."""


class RowNumbers(NamedTuple):
    """How many fp32 numbers ride on the messages of one matrix. They need no collective of their own.

    Rows are those of the operator: outputs.
    """

    to_owner: int = 0
    """A row, from a shard to the owner; of a row that several shards hold, each sends the same."""
    to_shards: int = 0
    """A row, from the owner back to every shard that holds a part of it."""
    scalars: int = 0
    """A matrix, from the owner to every shard."""


NO_NUMBERS = RowNumbers()
ROW_NUMBERS: Mapping[str, RowNumbers] = MappingProxyType({"muon": NO_NUMBERS, "normuon": RowNumbers(1, 1, 1)})
"""By algorithm. NorMuon: the row moment there, the new row moment and one factor back."""
