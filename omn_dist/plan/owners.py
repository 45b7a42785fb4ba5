"""Owners by longest processing time, then refined: which rank orthogonalises which matrix."""

import heapq
from collections.abc import Sequence

from omn_dist.plan.matrix import Matrix


def assign_owners(matrices: Sequence[Matrix], world_size: int) -> tuple[int, ...]:
    """The owner of each matrix, in the order of ``matrices``.

    Longest processing time first (Graham 1969) by estimated FLOPs: the heaviest matrix that is left goes to the least loaded
    rank. Then single moves and swaps lower the heaviest rank until none helps. A matrix that lies whole on some ranks stays
    with them and need not travel; its load counts for the others. Ties are broken by name and by rank, so the answer
    depends on the matrices alone, never on their order.
    """
    order = sorted(range(len(matrices)), key=lambda index: (-matrices[index].flops, matrices[index].name))
    owners = [0] * len(matrices)
    loads = [0] * world_size
    free = []
    for index in order:
        candidates = matrices[index].candidates()
        if len(candidates) == world_size:
            free.append(index)
            continue
        owners[index] = min(candidates, key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += matrices[index].flops
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for index in free:
        load, rank = heapq.heappop(heap)
        owners[index] = rank
        heapq.heappush(heap, (load + matrices[index].flops, rank))
    _refine(matrices, owners, free, loads)
    return tuple(owners)


def _refine(matrices: Sequence[Matrix], owners: list[int], free: Sequence[int], loads: list[int]) -> None:
    """Lower the heaviest rank by moving one of its free matrices, or swapping it for a lighter one, while that is possible.

    ``loads`` is what the other matrices make of each rank; it is used up.
    """
    world_size = len(loads)
    flops = [matrix.flops for matrix in matrices]
    # Matrices of one cost are interchangeable, so that a rank is a small table from cost to its matrices.
    held: list[dict[int, list[int]]] = [{} for _ in range(world_size)]
    for index in free:
        loads[owners[index]] += flops[index]
        held[owners[index]].setdefault(flops[index], []).append(index)

    def relocate(index: int, source: int, target: int) -> None:
        held[source][flops[index]].remove(index)
        if not held[source][flops[index]]:
            del held[source][flops[index]]
        held[target].setdefault(flops[index], []).append(index)
        loads[source] -= flops[index]
        loads[target] += flops[index]
        owners[index] = target

    for _ in range(4 * len(free)):
        heaviest = max(range(world_size), key=lambda rank: (loads[rank], -rank))
        best: tuple[int, int, int, int] | None = None
        for target in range(world_size):
            gap = loads[heaviest] - loads[target]
            if gap <= 0:
                continue
            for given in held[heaviest]:
                for taken in (0, *held[target]):
                    shift = given - taken
                    if 0 < shift < gap:
                        # What counts is the higher of the two ranks afterwards.
                        candidate = (max(loads[heaviest] - shift, loads[target] + shift), target, given, taken)
                        if best is None or candidate < best:
                            best = candidate
        if best is None:
            return
        _, target, given, taken = best
        if taken:
            relocate(held[target][taken][-1], target, heaviest)
        relocate(held[heaviest][given][-1] if given != taken else held[heaviest][given][0], heaviest, target)
