"""Waves: which matrices are moved and worked on together, under a byte budget, with all ranks busy to the end of each."""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from omn_dist.plan.matrix import Matrix
from omn_dist.plan.tally import Tally

# Smaller budgets are taken literally, as far as whole matrices allow: who asks for them wants many waves, not a fast step.
_LITERAL_BYTES = 2**20

_LEAST_BYTES, _MOST_BYTES = 2**20, 2**26

# Of the largest kind, in both slots and the stack together, by default.
_MATRICES = 6

_LEAST_WAVES = 8
"""By default: the first gather and the last scatter, which nothing hides, are then a small part of all."""

Waves = list[list[int]]
"""Indices into matrices."""


def default_wave_bytes(matrices: Sequence[Matrix], world_size: int, wire_itemsize: int) -> int:
    """The budget of a wave when none is given, within 1 to 64 MiB: both slots and the stack together take about six of the largest
    matrices.

    So temporaries depend on the width of a model, not on its depth and little on the number of ranks. On two ranks this is room
    for two matrices a rank; on more, of whose shards less stays at home, for one and a half and less. Half of it would do to move
    every matrix, but ranks of uneven speed then wait for each other more often (measured on two cores: 5 % of a step).
    """
    tally = Tally(matrices, [0] * len(matrices), world_size, wire_itemsize)
    matrix, slot = tally.largest_matrix, tally.largest_round
    return min(max(slot * _MATRICES * matrix // max(2 * slot + matrix, 1), _LEAST_BYTES), _MOST_BYTES)


def least_waves(matrices: Sequence[Matrix], world_size: int, wire_itemsize: int) -> int:
    """Waves when no budget is given: eight, or fewer where they would be smaller than 1 MiB on a rank."""
    share = sum(matrix.num_elements for matrix in matrices) * wire_itemsize // world_size
    return max(1, min(_LEAST_WAVES, share // _LEAST_BYTES))


def lockstep_makespan(waves: Sequence[Sequence[int]], owners: Sequence[int], costs: Sequence[int], world_size: int) -> int:
    """Sum over waves of the slowest rank's cost: what a step takes when every wave waits for its last rank."""
    owner, cost = np.asarray(owners, dtype=np.int64), np.asarray(costs, dtype=np.int64)
    slowest = 0
    for wave in waves:
        indices = np.asarray(wave, dtype=np.int64)
        loads = np.zeros(world_size, dtype=np.int64)
        np.add.at(loads, owner[indices], cost[indices])
        slowest += int(loads.max())
    return slowest


def assign_waves(
    matrices: Sequence[Matrix],
    owners: Sequence[int],
    world_size: int,
    wave_bytes: int,
    wire_itemsize: int,
    costs: Sequence[int] | None = None,
    least: int = 1,
) -> tuple[tuple[int, ...], ...]:
    """The matrices of each wave, as indices into ``matrices``, in the order in which they are packed.

    A round holds one matrix of one kind for every rank, and so is level. What ranks own beyond their common rounds is what
    they differ by; its sums are level too, up to the imbalance of the whole step. So the differences go into one set, or into
    as few as the budget allows, and these and the rounds are spread over the waves. The sum over waves of the slowest rank is
    then that of the busiest rank: as if ranks never waited for each other.

    Waves go through the layers from the first to the last, in the order of the numbers in names: what the next forward needs first
    is ready first, and gradients of neighbours are there at about the same time.

    The number of waves is the smallest for which neither a slot (what goes out and comes in) nor the stack of whole matrices
    needs more than ``wave_bytes`` on any rank; where a single matrix needs more, a budget of at least
    1 MiB becomes 5/4 of what that takes.

    Args:
        matrices: on ``world_size`` ranks.
        owners: the owner of each.
        world_size: number of ranks.
        wave_bytes: budget of one slot and of the stack, on each rank.
        wire_itemsize: bytes of one element in flight.
        costs: work of each matrix; its FLOPs when ``None``.
        least: the smallest number of waves, as far as there is something for each.
    """
    if not matrices:
        return ()
    if costs is None:
        costs = [matrix.flops for matrix in matrices]
    tally = Tally(matrices, owners, world_size, wire_itemsize)
    queues: list[list[int]] = [[] for _ in range(world_size)]
    keys = [_by_layer(matrix.name) for matrix in matrices]
    for index in sorted(range(len(matrices)), key=lambda index: (-costs[index], keys[index])):
        queues[owners[index]].append(index)
    sizes = [matrix.num_elements for matrix in matrices]
    rounds, differences = _common_rounds(queues, tally.kinds.tolist())
    most = wave_budget(wave_bytes, tally)
    weights = _weights(differences, costs, sizes)
    sets = rounds + fewest(lambda count: _by_share(differences, weights, count), tally, most, differences)
    sets.sort(key=lambda part: min(keys[index] for index in part))
    # The rank that holds most of a set decides how much room the set needs.
    room = [int(max(np.bincount([owners[index] for index in part], [sizes[index] for index in part]))) for part in sets]
    waves = fewest(lambda count: _spread(sets, room, count), tally, most, [list(range(len(sets)))], least)
    return tuple(tuple(sorted(wave, key=lambda index: matrices[index].name)) for wave in waves)


def wave_budget(wave_bytes: int, tally: Tally) -> int:
    """The bytes that a wave may really need: small budgets literally, others at least what the largest matrix needs."""
    # A quarter more on top often saves the ranks a whole wait for each other.
    return wave_bytes if wave_bytes < _LITERAL_BYTES else max(wave_bytes, tally.largest_round * 5 // 4)


def _by_layer(name: str) -> tuple[tuple[int, str], ...]:
    """Names in the order of the numbers in them: layer 2 before layer 10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name))


def _common_rounds(queues: Sequence[Sequence[int]], kinds: Sequence[int]) -> tuple[Waves, Waves]:
    """Sets of one matrix of one kind for every rank, and what is left of each queue."""
    by_kind: list[dict[int, list[int]]] = []
    for queue in queues:
        own: dict[int, list[int]] = {}
        for index in queue:
            own.setdefault(kinds[index], []).append(index)
        by_kind.append(own)
    rounds: Waves = []
    num_common = {kind: min(len(own.get(kind, ())) for own in by_kind) for kind in by_kind[0]}
    for kind, count in num_common.items():
        rounds += [list(indices) for indices in zip(*(own.get(kind, [])[:count] for own in by_kind), strict=True)]
    taken = {index for indices in rounds for index in indices}
    return rounds, [[index for index in queue if index not in taken] for queue in queues]


def fewest(cut: Callable[[int], Waves], tally: Tally, budget: int, queues: Sequence[Sequence[int]], least: int = 1) -> Waves:
    """The cut into the smallest number of waves, not under ``least``, within ``budget`` bytes, or else with as few bytes as can be.

    Temporaries fall with the number of waves, down to those of the largest matrix: doubling until the budget holds, then
    bisection.
    """
    most = max(map(len, queues))
    if most == 0:
        return []

    def needed(waves: Waves) -> int:
        return tally.traffic(waves).temporary

    high = min(least, most)
    low = high - 1
    best = cut(high)
    while needed(best) > budget and high < most:
        low, high = high, min(2 * high, most)
        best = min(best, cut(high), key=needed)
    if needed(best) > budget:
        return best
    while high - low > 1:
        middle = (low + high) // 2
        waves = cut(middle)
        if needed(waves) <= budget:
            high, best = middle, waves
        else:
            low = middle
    return best


def _spread(sets: Waves, room: Sequence[int], num_waves: int) -> Waves:
    """Whole sets into waves of about equal room, neighbours together; the first and the last get half as much.

    The first gather and the last scatter have nothing to hide behind.
    """
    waves: Waves = [[] for _ in range(num_waves)]
    total, done = max(sum(room), 1), 0
    for part, needed in zip(sets, room, strict=True):
        # The middle of a set's room decides its wave.
        waves[min(((2 * done + needed) * (num_waves - 1) + total) // (2 * total), num_waves - 1)] += part
        done += needed
    return [wave for wave in waves if wave]


def _weights(queues: Sequence[Sequence[int]], costs: Sequence[int], sizes: Sequence[int]) -> dict[int, int]:
    """Half by costs, half by elements: by costs alone the cheap but large matrices would all fall into one last part that no
    budget could hold. Integers, so that every machine cuts alike.
    """
    total_cost = sum(costs[index] for queue in queues for index in queue)
    total_size = sum(sizes[index] for queue in queues for index in queue)
    return {index: costs[index] * total_size + sizes[index] * total_cost for queue in queues for index in queue}


def _by_share(queues: Sequence[Sequence[int]], weights: Mapping[int, int], num_parts: int) -> Waves:
    """Part k of K holds what takes each rank to the share (k + 1) / K of the heaviest queue.

    What a rank is ahead by in one part it does less of in the next.
    """
    heaviest = max(1, *(sum(weights[index] for index in queue) for queue in queues))  # all may be empty
    parts: Waves = [[] for _ in range(num_parts)]
    for queue in queues:
        done = 0
        for index in queue:
            # The middle of a matrix's share decides its part.
            middle = 2 * done + weights[index]
            parts[min(middle * num_parts // (2 * heaviest), num_parts - 1)].append(index)
            done += weights[index]
    return [part for part in parts if part]
