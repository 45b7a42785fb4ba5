"""Bytes of messages, counted one matrix and one rank at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from omn_dist.plan import Matrix

Counts = np.ndarray[Any, np.dtype[np.int64]]


def counted_messages(
    matrices: Sequence[Matrix], owners: Sequence[int], wave: Sequence[int], world_size: int, itemsize: int
) -> tuple[Counts, Counts]:
    """Bytes of each message of a wave's gather, and of its scatter: ``[shard rank, owner]``."""
    gather, scatter = np.zeros((2, world_size, world_size), dtype=np.int64)
    for index in wave:
        matrix, owner, numbers = matrices[index], owners[index], matrices[index].work.row_numbers
        for rank in range(world_size):
            regions = matrix.shard_regions(rank)
            if rank == owner or not regions:
                continue
            elements = sum(region.num_elements for region in regions)
            rows = sum(region.num_columns if matrix.transposed else region.num_rows for region in regions)
            # Elements up to a multiple of four bytes, and a flag.
            payload = -(-elements * itemsize // 4) * 4 + 4
            scatter[rank, owner] += payload + 4 * (numbers.to_shards * rows + numbers.scalars)
            if matrix.layout.replica(rank) == matrix.layout.replica(owner):
                gather[rank, owner] += payload + 4 * numbers.to_owner * rows
    return gather, scatter
