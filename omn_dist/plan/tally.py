"""Traffic of many matrices of few kinds: what ``plan.traffic`` adds up one by one, for all waves at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omn_dist.algorithms.row_numbers import RowNumbers
from omn_dist.plan.layout import Layout, Piece
from omn_dist.plan.matrix import Matrix

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class StepTraffic:
    """Bytes of every wave and rank, ``[waves, world_size]`` each; the fields are those of ``plan.traffic.WaveTraffic``."""

    gather_sent: Integers
    gather_received: Integers
    scatter_sent: Integers
    scatter_received: Integers
    stack: Integers

    @property
    def temporary(self) -> int:
        """The largest of gather slot, scatter slot and stack of any wave on any rank: what the byte budget bounds."""
        sums = (self.gather_sent + self.gather_received, self.scatter_sent + self.scatter_received, self.stack)
        return max(int(part.max(initial=0)) for part in sums)


@dataclass(frozen=True)
class _Messages:
    """What matrices of one kind move, whoever owns them; arrays are ``[world_size]``."""

    gather: Integers
    """Bytes of the message about the shard of each rank, on its way to an owner of its copy of the parameter."""
    copy: Integers
    """A number for each copy."""
    gather_of_copy: Integers
    """Bytes of all such messages of the copy that the rank belongs to."""
    scatter: Integers
    """Bytes of the message about the shard of each rank, on its way back."""
    stack_bytes: int


class Tally:
    """Sums for sets of matrices of one plan. Matrices of one kind lie alike on the ranks."""

    def __init__(self, matrices: Sequence[Matrix], owners: Sequence[int], world_size: int, wire_itemsize: int) -> None:
        self._owners = np.asarray(owners, dtype=np.int64)
        self._world_size = world_size
        numbers: dict[tuple[Layout, tuple[Piece, ...], bool, RowNumbers], int] = {}
        kinds = [
            numbers.setdefault((matrix.layout, matrix.region, matrix.transposed, matrix.row_numbers), len(numbers))
            for matrix in matrices
        ]
        self.kinds: Integers = np.array(kinds, dtype=np.int64)
        """The kind of each matrix, numbered by first appearance."""
        firsts: dict[int, Matrix] = {}
        for matrix, kind in zip(matrices, kinds, strict=True):
            firsts.setdefault(kind, matrix)
        self._messages = [_messages(firsts[kind], wire_itemsize) for kind in range(len(firsts))]

    @property
    def largest_matrix(self) -> int:
        """Bytes of one matrix of the largest kind: whole at its owner, or in the messages from all shards of one copy."""
        return max((max(kind.stack_bytes, int(kind.gather_of_copy.max())) for kind in self._messages), default=0)

    @property
    def largest_round(self) -> int:
        """Bytes of slot or stack that one matrix of the largest kind for every rank needs."""
        needed = [0]
        for messages in self._messages:
            for message in (messages.gather, messages.scatter):
                others = (self._world_size - 1) * message
                needed.append(int((others + message.sum() - message).max()))
            needed.append(messages.stack_bytes)
        return max(needed)

    def num_holders(self, index: int) -> int:
        """Ranks that hold a part of the matrix."""
        return int(np.count_nonzero(self._messages[self.kinds[index]].gather))

    def parts(self, waves: Sequence[Sequence[int]]) -> Integers:
        """``[waves, world_size]``: of how many matrices of each wave each rank holds a part."""
        found = np.zeros((len(waves), self._world_size), dtype=np.int64)
        for number, wave in enumerate(waves):
            counts = np.bincount(self.kinds[list(wave)], minlength=len(self._messages))
            for kind in np.flatnonzero(counts):
                found[number] += counts[kind] * (self._messages[kind].gather > 0)
        return found

    def traffic(self, waves: Sequence[Sequence[int]]) -> StepTraffic:
        """The bytes of each of these sets of matrices."""
        shape = (len(waves), self._world_size)
        gather_sent, gather_received, scatter_sent, scatter_received, stack = np.zeros((5, *shape), dtype=np.int64)
        indices = np.array([index for wave in waves for index in wave], dtype=np.int64)
        wave_of = np.repeat(np.arange(len(waves)), [len(wave) for wave in waves])
        for kind, messages in enumerate(self._messages):
            chosen = self.kinds[indices] == kind
            place = wave_of[chosen] * self._world_size + self._owners[indices[chosen]]
            owned = np.bincount(place, minlength=shape[0] * shape[1]).reshape(shape).astype(np.int64)
            per_copy = np.zeros((int(messages.copy.max()) + 1, len(waves)), dtype=np.int64)
            np.add.at(per_copy, messages.copy, owned.T)
            # What a rank owns of its own shard does not travel.
            gather_sent += (per_copy[messages.copy].T - owned) * messages.gather
            gather_received += owned * (messages.gather_of_copy - messages.gather)
            scatter_sent += owned * (messages.scatter.sum() - messages.scatter)
            scatter_received += (owned.sum(axis=1, keepdims=True) - owned) * messages.scatter
            stack += owned * messages.stack_bytes
        return StepTraffic(gather_sent, gather_received, scatter_sent, scatter_received, stack)


def _messages(matrix: Matrix, wire_itemsize: int) -> _Messages:
    copy = matrix.held.replica
    gather = matrix.gather_messages(wire_itemsize)
    gather_of_copy = np.bincount(copy, weights=gather)[copy].astype(np.int64)
    return _Messages(gather, copy, gather_of_copy, matrix.scatter_messages(wire_itemsize), matrix.stack_bytes(wire_itemsize))
