"""Waves: which matrices are moved and worked on together, under a byte budget."""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from omn_dist.plan.geometry.matrix import Matrix
from omn_dist.plan.geometry.traffic import TrafficCounter

# A smaller budget is kept even where that needs many waves, as far as single matrices allow.
_LITERAL_BYTES = 2**20

_LEAST_BYTES, _MOST_BYTES = 2**20, 2**26

# How many of the largest matrices both slots and the stack hold together by default.
_MATRICES = 6

_LEAST_WAVES = 8
"""By default. Nothing hides the first gather and the last scatter, so they should be short."""

Waves = list[list[int]]
"""Indices of matrices."""


def default_wave_bytes(matrices: Sequence[Matrix], world_size: int, communication_itemsize: int) -> int:
    """The byte budget of a wave when none is given: 1 to 64 MiB.

    With m bytes of the largest matrix and s bytes of a slot for one of them on every rank, it is
    ``6 s m / (2 s + m)``: both slots and the stack together take about six of the largest matrices.
    So temporaries depend on the width of a model, not on its depth, and little on the number of
    ranks. On two ranks s = m, which is room for two matrices a rank; on many s is near 2 m, room
    for 1.2.
    """
    counter = TrafficCounter(matrices, [0] * len(matrices), world_size, communication_itemsize)
    matrix, slot = counter.largest_matrix, counter.largest_round
    return min(max(slot * _MATRICES * matrix // max(2 * slot + matrix, 1), _LEAST_BYTES), _MOST_BYTES)


def least_waves(matrices: Sequence[Matrix], world_size: int, communication_itemsize: int) -> int:
    """Waves without a given budget: eight, or fewer that have at least 1 MiB a rank."""
    share = sum(matrix.num_elements for matrix in matrices) * communication_itemsize // world_size
    return max(1, min(_LEAST_WAVES, share // _LEAST_BYTES))


def lockstep_makespan(waves: Sequence[Sequence[int]], owners: Sequence[int], costs: Sequence[int], world_size: int) -> int:
    """Sum over waves of the slowest rank's cost: every wave waits for its last rank."""
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
    communication_itemsize: int,
    costs: Sequence[int] | None = None,
    least: int = 1,
) -> tuple[tuple[int, ...], ...]:
    """The matrices of each wave, as indices into ``matrices``, in the order of packing.

    A *round* is one matrix of one kind for every rank, so its ranks finish together. The matrices
    beyond the common rounds of all ranks go into one set, or into as few sets as the budget allows;
    the loads of a set differ by no more than those of the whole step. Rounds and sets are spread
    over the waves. The sum over waves of the slowest rank is then the load of the busiest rank, as
    if ranks never waited for each other.

    Waves follow the numbers in names, from the first layer to the last: the next forward needs the
    first layers first, and gradients of neighbouring layers are ready at about the same time.

    The number of waves is the smallest for which slots (sent and received bytes) and the stack of
    whole matrices need at most ``wave_bytes`` on every rank. Where a single matrix needs more, a
    budget of at least 1 MiB is raised to 5/4 of what that matrix needs.

    Args:
        matrices: on ``world_size`` ranks.
        owners: the owner of each matrix.
        world_size: number of ranks.
        wave_bytes: budget in bytes of one slot and of the stack, on each rank.
        communication_itemsize: bytes of one element in flight.
        costs: work of each matrix; its FLOPs when ``None``.
        least: the smallest number of waves, where there is something for each.
    """
    if not matrices:
        return ()
    if costs is None:
        costs = [matrix.flops for matrix in matrices]
    counter = TrafficCounter(matrices, owners, world_size, communication_itemsize)
    queues: list[list[int]] = [[] for _ in range(world_size)]
    keys = [natural_order(matrix.name) for matrix in matrices]
    for index in sorted(range(len(matrices)), key=lambda index: (-costs[index], keys[index])):
        queues[owners[index]].append(index)
    sizes = [matrix.num_elements for matrix in matrices]
    rounds, differences = _common_rounds(queues, counter.kinds.tolist())
    most = wave_budget(wave_bytes, counter)
    weights = _weights(differences, costs, sizes)
    sets = rounds + fewest_waves(lambda count: _by_share(differences, weights, count), counter, most, differences)
    sets.sort(key=lambda members: min(keys[index] for index in members))
    # The rank that owns most of a set decides how much room the set needs.
    room = [int(max(np.bincount([owners[index] for index in members], [sizes[index] for index in members]))) for members in sets]
    waves = fewest_waves(lambda count: _spread(sets, room, count), counter, most, [list(range(len(sets)))], least)
    return tuple(tuple(sorted(wave, key=lambda index: matrices[index].name)) for wave in waves)


def wave_budget(wave_bytes: int, counter: TrafficCounter) -> int:
    """Bytes that a wave may need: the budget, raised for the largest matrix from 1 MiB on."""
    # A quarter more often saves the ranks a whole wait for each other.
    return wave_bytes if wave_bytes < _LITERAL_BYTES else max(wave_bytes, counter.largest_round * 5 // 4)


def fewest_waves(
    make: Callable[[int], Waves], counter: TrafficCounter, budget: int, queues: Sequence[Sequence[int]], least: int = 1
) -> Waves:
    """As few waves as ``budget`` bytes allow, or the waves that need fewest bytes where none do.

    Bytes fall with the number of waves, down to those of the largest matrix. So the number is
    doubled until the budget holds, then found by bisection.

    Args:
        make: gives the waves for a number of waves.
        counter: counts their bytes.
        budget: bytes of slot and stack.
        queues: more waves than the longest of them make no difference.
        least: the smallest number of waves.
    """
    most = max(map(len, queues))
    if most == 0:
        return []

    def needed(waves: Waves) -> int:
        return counter.step_traffic(waves).temporary

    high = min(least, most)
    low = high - 1
    best = make(high)
    while needed(best) > budget and high < most:
        low, high = high, min(2 * high, most)
        best = min(best, make(high), key=needed)
    if needed(best) > budget:
        return best
    while high - low > 1:
        middle = (low + high) // 2
        waves = make(middle)
        if needed(waves) <= budget:
            high, best = middle, waves
        else:
            low = middle
    return best


def natural_order(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key for names: numbers in them count by value, layer 2 before layer 10."""
    return tuple((int(text), "") if text.isdecimal() else (-1, text) for text in re.split(r"(\d+)", name))


def _common_rounds(queues: Sequence[Sequence[int]], kinds: Sequence[int]) -> tuple[Waves, Waves]:
    """Sets of one matrix of one kind for every rank, and the rest of each rank's queue."""
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


def _spread(sets: Waves, room: Sequence[int], num_waves: int) -> Waves:
    """Whole sets into waves of about equal room, in order.

    The first and the last wave get half as much: nothing hides the first gather and the last
    scatter.
    """
    waves: Waves = [[] for _ in range(num_waves)]
    total, done = max(sum(room), 1), 0
    for members, needed in zip(sets, room, strict=True):
        # The middle of a set's room decides its wave.
        waves[min(((2 * done + needed) * (num_waves - 1) + total) // (2 * total), num_waves - 1)] += members
        done += needed
    return [wave for wave in waves if wave]


def _weights(queues: Sequence[Sequence[int]], costs: Sequence[int], sizes: Sequence[int]) -> dict[int, int]:
    """Weights of matrices, half by costs and half by elements; integers, the same on every machine.

    By costs alone the cheap but large matrices would all be in the last set, which no budget holds.
    """
    total_cost = sum(costs[index] for queue in queues for index in queue)
    total_size = sum(sizes[index] for queue in queues for index in queue)
    return {index: costs[index] * total_size + sizes[index] * total_cost for queue in queues for index in queue}


def _by_share(queues: Sequence[Sequence[int]], weights: Mapping[int, int], num_sets: int) -> Waves:
    """Sets of matrices: set k of K brings each rank to (k + 1) / K of the heaviest queue's weight.

    A rank that has more than its share in one set has less in the next.
    """
    heaviest = max(1, *(sum(weights[index] for index in queue) for queue in queues))
    sets: Waves = [[] for _ in range(num_sets)]
    for queue in queues:
        done = 0
        for index in queue:
            # The middle of a matrix's weight decides its set.
            middle = 2 * done + weights[index]
            sets[min(middle * num_sets // (2 * heaviest), num_sets - 1)].append(index)
            done += weights[index]
    return [members for members in sets if members]
