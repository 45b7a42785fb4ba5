"""Owners: which rank orthogonalises which matrix, with the busiest rank close to a proven bound."""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from omn_dist.plan.assign.bounds import makespan_bound
from omn_dist.plan.assign.filling import filled_owners
from omn_dist.plan.geometry.layout import Layout, Region
from omn_dist.plan.geometry.matrix import Matrix

Integers = NDArray[np.int64]

# Where an assignment is this close to its bound the search ends: the rest cannot be measured.
_CLOSE = 5e-4
# Assignments whose busiest ranks differ by less are equally good; their waves decide.
_AS_GOOD = 5e-3
# Pairs of matrices compared in one refinement: limits the time by a count that no machine changes.
_MOST_PAIRS = 10_000_000


def propose_owners(matrices: Sequence[Matrix], world_size: int, costs: Sequence[int]) -> list[tuple[int, ...]]:
    """One or two about equally good assignments: the owner of each of ``matrices``, in order.

    Longest processing time first (Graham 1969): the heaviest matrix left goes to the least loaded
    rank, and of equally loaded ranks to the one with fewest elements. Then single moves and swaps
    lower the busiest rank until none helps. Where that does not reach the proven bound, a second
    assignment fills one rank after the other as near to a target as whole matrices allow, for the
    lowest target that holds all of them (subset sums, as in Caprara and Pferschy 2004). It mixes
    the kinds of matrices less evenly over ranks, so the waves decide between the two.

    A matrix that some ranks hold whole is owned by one of them and is not sent; its load counts.
    Ties are broken by name and by rank, so the answer does not depend on the order of ``matrices``.

    Args:
        matrices: on ``world_size`` ranks, with unique names.
        world_size: number of ranks.
        costs: one non-negative integer a matrix.
    """
    order = sorted(range(len(matrices)), key=lambda index: (-costs[index], matrices[index].name))
    owners = np.zeros(len(matrices), dtype=np.int64)
    loads, sizes = [0] * world_size, [0] * world_size
    free = []
    by_kind: dict[tuple[Layout, tuple[Region, ...]], tuple[int, ...]] = {}
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
    """Owners of matrices in this order, heaviest first: each goes to the rank with least."""
    heap = [(load, size_sum, rank) for rank, (load, size_sum) in enumerate(zip(loads, sizes, strict=True))]
    heapq.heapify(heap)
    owners = []
    for matrix_cost, matrix_size in zip(cost.tolist(), size.tolist(), strict=True):
        load, size_sum, rank = heap[0]
        owners.append(rank)
        heapq.heapreplace(heap, (load + matrix_cost, size_sum + matrix_size, rank))
    return np.array(owners, dtype=np.int64)


def _lower(
    owners: Integers,
    weight: Integers,
    pinned: Integers,
    least: int,
    other: Integers | None = None,
    other_pinned: Integers | None = None,
) -> None:
    """Lower the largest sum of ``weight`` of a rank, by changing ``owners`` in place.

    The rank gives a matrix away or swaps it for a lighter one. Of all exchanges, the one is taken
    that leaves the higher of its two ranks lowest. This ends when none helps, or at ``least``. Sums
    of ``other`` never exceed the largest that they had.
    """
    sums = pinned.copy()
    np.add.at(sums, owners, weight)
    ranks = np.arange(len(sums))
    nothing = np.zeros(len(sums), dtype=np.int64)
    # What the other rank gives back: one of its matrices, or nothing.
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
        # Matrices of equal weights are interchangeable: the first of them is enough.
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
