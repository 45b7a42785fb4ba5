"""Owners: which rank orthogonalises which matrix, so that the busiest rank has as little to do as can be proven possible."""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from omn_dist.plan.bounds import makespan_bound
from omn_dist.plan.filling import filled_owners
from omn_dist.plan.layout import Layout, Piece
from omn_dist.plan.matrix import Matrix

Integers = NDArray[np.int64]

# An assignment that is this close to its bound is not searched further: nobody can measure the rest.
_CLOSE = 5e-4
# Assignments whose busiest ranks differ by no more are equally good; then the waves decide.
_AS_GOOD = 5e-3
# Comparisons of pairs of matrices in one refinement: a bound on its time that is the same on every machine.
_MOST_PAIRS = 10_000_000


def propose_owners(matrices: Sequence[Matrix], world_size: int, costs: Sequence[int]) -> list[tuple[int, ...]]:
    """One or two assignments of about the same quality: the owner of each matrix, in the order of ``matrices``.

    Longest processing time first (Graham 1969): the heaviest matrix that is left goes to the least loaded rank, and of equally
    loaded ones to that with fewest elements. Then single moves and swaps lower the busiest rank until none helps. Where that
    ends away from the proven bound, a second assignment fills one rank after the other as near to a target as whole matrices
    allow, for the lowest target that holds all (subset sums, as in Caprara and Pferschy 2004). It is less even in kinds of
    matrices, so waves decide between the two.

    A matrix that lies whole on some ranks stays with them and need not travel; its load counts for the others. Ties are broken
    by name and by rank, so the answer depends on the matrices alone, never on their order.

    Args:
        matrices: on ``world_size`` ranks, with unique names.
        world_size: number of ranks.
        costs: one non-negative integer a matrix.
    """
    order = sorted(range(len(matrices)), key=lambda index: (-costs[index], matrices[index].name))
    owners = np.zeros(len(matrices), dtype=np.int64)
    loads, sizes = [0] * world_size, [0] * world_size
    free = []
    by_kind: dict[tuple[Layout, tuple[Piece, ...]], tuple[int, ...]] = {}
    for index in order:
        kind = (matrices[index].layout, matrices[index].region)
        if kind not in by_kind:
            by_kind[kind] = matrices[index].candidates()
        candidates = by_kind[kind]
        if len(candidates) == world_size:
            free.append(index)
            continue
        rank = min(candidates, key=lambda rank: (loads[rank], sizes[rank], rank))
        owners[index] = rank
        loads[rank] += costs[index]
        sizes[rank] += matrices[index].num_elements
    cost = np.array([costs[index] for index in free], dtype=np.int64)
    size = np.array([matrices[index].num_elements for index in free], dtype=np.int64)
    least = makespan_bound(costs, world_size).value
    pinned, pinned_sizes = np.array(loads, dtype=np.int64), np.array(sizes, dtype=np.int64)
    proposals = [_longest_first(cost, size, loads, sizes)]
    _lower(proposals[0], cost, pinned, least)
    busiest = _busiest(proposals[0], cost, pinned)
    if busiest > least * (1 + _CLOSE) and not any(loads):
        filled = filled_owners(cost, world_size, least, busiest)
        if filled is not None:
            proposals.insert(0, filled)
    most = min(_busiest(proposal, cost, pinned) for proposal in proposals) * (1 + _AS_GOOD)
    found = []
    for proposal in proposals:
        if _busiest(proposal, cost, pinned) <= most:
            _lower(proposal, size, pinned_sizes, 0, cost, pinned)
            owners[free] = proposal
            found.append(tuple(owners.tolist()))
    return found


def _busiest(owners: Integers, cost: Integers, pinned: Integers) -> int:
    loads = pinned.copy()
    np.add.at(loads, owners, cost)
    return int(loads.max())


def _longest_first(cost: Integers, size: Integers, loads: Sequence[int], sizes: Sequence[int]) -> Integers:
    """Owners of matrices that come heaviest first, each to the rank that has least."""
    heap = [(load, held, rank) for rank, (load, held) in enumerate(zip(loads, sizes, strict=True))]
    heapq.heapify(heap)
    owners = []
    for matrix_cost, matrix_size in zip(cost.tolist(), size.tolist(), strict=True):
        load, held, rank = heap[0]
        owners.append(rank)
        heapq.heapreplace(heap, (load + matrix_cost, held + matrix_size, rank))
    return np.array(owners, dtype=np.int64)


def _lower(
    owners: Integers,
    weight: Integers,
    pinned: Integers,
    least: int,
    other: Integers | None = None,
    other_pinned: Integers | None = None,
) -> None:
    """Lower the rank of the largest sum of ``weight``, in place: it gives a matrix away, or swaps it for a lighter one.

    Each time the exchange is taken after which the higher of its two ranks is lowest. It ends when none helps, or at
    ``least``. Sums of ``other`` never pass the largest that they had.
    """
    sums = pinned.copy()
    np.add.at(sums, owners, weight)
    ranks = np.arange(len(sums))
    nothing = np.zeros(len(sums), dtype=np.int64)
    # What a target may give back: one of its matrices, or nothing.
    back_weight = np.concatenate((weight, nothing))
    back_other, other_sums, limit = None, None, 0
    if other is not None and other_pinned is not None:
        back_other, other_sums = np.concatenate((other, nothing)), other_pinned.copy()
        np.add.at(other_sums, owners, other)
        limit = int(other_sums.max())
    pairs = 0
    while pairs < _MOST_PAIRS:
        busiest = int(sums.argmax())
        if sums[busiest] <= least:
            return
        mine = np.flatnonzero(owners == busiest)
        # Matrices that count the same are interchangeable: the first of them will do.
        keys = weight[mine] if other is None else np.stack((weight[mine], other[mine]), axis=1)
        mine = mine[np.unique(keys, axis=0, return_index=True)[1]]
        targets = np.concatenate((owners, ranks))
        shift = weight[mine][:, None] - back_weight[None, :]
        after = np.maximum(sums[busiest] - shift, sums[targets] + shift)
        allowed = (shift > 0) & (after < sums[busiest]) & (targets != busiest)
        if other is not None and other_sums is not None and back_other is not None:
            other_shift = other[mine][:, None] - back_other[None, :]
            allowed &= (other_sums[busiest] - other_shift <= limit) & (other_sums[targets] + other_shift <= limit)
        pairs += allowed.size
        if not allowed.any():
            return
        given, taken = np.unravel_index(int(np.where(allowed, after, sums[busiest]).argmin()), allowed.shape)
        target, amount = targets[taken], shift[given, taken]
        if other_sums is not None:
            moved = other_shift[given, taken]
            other_sums[busiest] -= moved
            other_sums[target] += moved
        sums[busiest] -= amount
        sums[target] += amount
        owners[mine[given]] = target
        if taken < len(owners):
            owners[taken] = busiest
