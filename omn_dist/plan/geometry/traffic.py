"""Bytes that waves move between ranks, counted for all matrices of one kind at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from omn_dist.plan.geometry.layout import Layout, Region
from omn_dist.plan.geometry.matrix import Matrix, RowNumbers

Transport = Literal["all_to_all", "all_gather"]
"""How a wave is moved.

``all_to_all``: one uneven all-to-all to the owners and one back. ``all_gather``: every rank
receives the directions of all ranks, and each owner scatters its updates. The second sends more
bytes; it is for fabrics without a good all-to-all.
"""

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class StepTraffic:
    """Bytes of every wave and rank by all-to-all, ``[waves, world_size]`` each."""

    gather_sent: Counts
    """To owners, from the owner's own copy of the parameter."""
    gather_received: Counts
    scatter_sent: Counts
    """By owners, to all copies of the parameter."""
    scatter_received: Counts
    stack: Counts
    """Whole matrices that each rank owns, with their row numbers."""

    @property
    def temporary(self) -> int:
        """The largest slot or stack of any wave and rank: what the byte budget limits."""
        buffers = (self.gather_sent + self.gather_received, self.scatter_sent + self.scatter_received, self.stack)
        return max(int(buffer.max(initial=0)) for buffer in buffers)


@dataclass(frozen=True)
class _MatrixTraffic:
    """What a matrix of one kind moves, whoever owns it; arrays are ``[world_size]``."""

    gather: Counts
    """Bytes of each rank's message to an owner elsewhere in its copy of the parameter."""
    copy: Counts
    """The index of the copy to which the rank's shard belongs."""
    gather_of_copy: Counts
    """Bytes of all gather messages of the rank's copy."""
    scatter: Counts
    """Bytes of the message to each rank from an owner elsewhere."""
    stack_bytes: int

    @classmethod
    def of(cls, matrix: Matrix, communication_itemsize: int) -> Self:
        copy = matrix.holdings.replica
        gather = matrix.gather_bytes(communication_itemsize)
        gather_of_copy = np.bincount(copy, weights=gather)[copy].astype(np.int64)
        scatter, stack_bytes = matrix.scatter_bytes(communication_itemsize), matrix.stack_bytes(communication_itemsize)
        return cls(gather, copy, gather_of_copy, scatter, stack_bytes)


class TrafficCounter:
    """Counts what matrices move. Those with equal layouts and row numbers are of one kind."""

    def __init__(self, matrices: Sequence[Matrix], owners: Sequence[int], world_size: int, communication_itemsize: int) -> None:
        self._owners = np.asarray(owners, dtype=np.int64)
        self._world_size = world_size
        known: dict[tuple[Layout, tuple[Region, ...], bool, RowNumbers], int] = {}
        kinds = [
            known.setdefault((matrix.layout, matrix.region, matrix.transposed, matrix.work.row_numbers), len(known))
            for matrix in matrices
        ]
        self.kinds: Counts = np.array(kinds, dtype=np.int64)
        """The kind of each matrix, numbered by first appearance."""
        firsts: dict[int, Matrix] = {}
        for matrix, kind in zip(matrices, kinds, strict=True):
            firsts.setdefault(kind, matrix)
        self._by_kind = [_MatrixTraffic.of(firsts[kind], communication_itemsize) for kind in range(len(firsts))]

    @property
    def largest_matrix(self) -> int:
        """Bytes of the largest matrix: whole at its owner, or in the messages of one copy."""
        return max((max(kind.stack_bytes, int(kind.gather_of_copy.max())) for kind in self._by_kind), default=0)

    @property
    def largest_round(self) -> int:
        """Bytes of slot or stack in a wave with one matrix of the largest kind for every rank."""
        needed = [0]
        for kind in self._by_kind:
            for message in (kind.gather, kind.scatter):
                # A rank exchanges one message with each other rank in either direction.
                needed.append(int(((self._world_size - 1) * message + message.sum() - message).max()))
            needed.append(kind.stack_bytes)
        return max(needed)

    def num_holders(self, index: int) -> int:
        """Ranks that hold elements of the matrix."""
        return int(np.count_nonzero(self._by_kind[self.kinds[index]].gather))

    def num_held(self, waves: Sequence[Sequence[int]]) -> Counts:
        """``[waves, world_size]``: matrices of each wave of which each rank holds elements."""
        found = np.zeros((len(waves), self._world_size), dtype=np.int64)
        for number, wave in enumerate(waves):
            counts = np.bincount(self.kinds[list(wave)], minlength=len(self._by_kind))
            for kind in np.flatnonzero(counts):
                found[number] += counts[kind] * (self._by_kind[kind].gather > 0)
        return found

    def step_traffic(self, waves: Sequence[Sequence[int]]) -> StepTraffic:
        """The bytes of these waves, given as indices of matrices."""
        shape = (len(waves), self._world_size)
        gather_sent, gather_received, scatter_sent, scatter_received, stack = np.zeros((5, *shape), dtype=np.int64)
        indices = np.array([index for wave in waves for index in wave], dtype=np.int64)
        wave_of = np.repeat(np.arange(len(waves)), [len(wave) for wave in waves])
        for number, kind in enumerate(self._by_kind):
            chosen = self.kinds[indices] == number
            cell = wave_of[chosen] * self._world_size + self._owners[indices[chosen]]
            owned = np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape).astype(np.int64)
            owned_in_copy = np.zeros((int(kind.copy.max()) + 1, len(waves)), dtype=np.int64)
            np.add.at(owned_in_copy, kind.copy, owned.T)
            # A rank sends nothing to itself.
            gather_sent += (owned_in_copy[kind.copy].T - owned) * kind.gather
            gather_received += owned * (kind.gather_of_copy - kind.gather)
            scatter_sent += owned * (kind.scatter.sum() - kind.scatter)
            scatter_received += (owned.sum(axis=1, keepdims=True) - owned) * kind.scatter
            stack += owned * kind.stack_bytes
        return StepTraffic(gather_sent, gather_received, scatter_sent, scatter_received, stack)

    def messages(self, wave: Sequence[int]) -> tuple[Counts, Counts]:
        """Bytes of each message of a wave's gather, and of its scatter: ``[shard rank, owner]``."""
        gather, scatter = np.zeros((2, self._world_size, self._world_size), dtype=np.int64)
        indices = np.array(wave, dtype=np.int64)
        for number, kind in enumerate(self._by_kind):
            owned = np.bincount(self._owners[indices[self.kinds[indices] == number]], minlength=self._world_size)
            owners = np.flatnonzero(owned)
            same_copy = kind.copy[:, None] == kind.copy[owners]
            gather[:, owners] += owned[owners] * same_copy * kind.gather[:, None]
            scatter[:, owners] += owned[owners] * kind.scatter[:, None]
        np.fill_diagonal(gather, 0)
        np.fill_diagonal(scatter, 0)
        return gather, scatter
