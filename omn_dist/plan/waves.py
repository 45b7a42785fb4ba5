"""Waves: which matrices are moved and worked on together, under a byte budget, with the ranks kept level."""

from collections.abc import Sequence

from omn_dist.plan.matrix import Matrix
from omn_dist.plan.traffic import wave_traffic


def assign_waves(
    matrices: Sequence[Matrix], owners: Sequence[int], world_size: int, wave_bytes: int, wire_itemsize: int
) -> tuple[tuple[int, ...], ...]:
    """The matrices of each wave, as indices into ``matrices``, in the order in which they are packed.

    Wave k of K holds, for every rank, the matrices by which the rank's own work first reaches the share (k + 1) / K of
    the heaviest rank's whole work. So every wave is level, and what a rank is ahead by in one wave it does less of in the
    next. K is the smallest number for which neither a slot (what goes out and comes in) nor the stack of whole matrices
    needs more than ``wave_bytes`` on any rank; where a single matrix needs more, the budget is what that takes.
    """
    queues = _queues(matrices, owners, world_size)
    most = max((len(queue) for queue in queues), default=0)
    if most == 0:
        return ()

    def needed(waves: tuple[tuple[int, ...], ...]) -> int:
        return max(wave_traffic(matrices, owners, wave, world_size, wire_itemsize).temporary for wave in waves)

    # Doubling until the budget holds, then bisection: temporaries fall with the number of waves down to the largest matrix.
    low, high = 0, 1
    best = _cut(matrices, queues, high)
    while needed(best) > wave_bytes and high < most:
        low, high = high, min(2 * high, most)
        best = min(best, _cut(matrices, queues, high), key=needed)
    if needed(best) > wave_bytes:
        return best
    while high - low > 1:
        middle = (low + high) // 2
        waves = _cut(matrices, queues, middle)
        if needed(waves) <= wave_bytes:
            high, best = middle, waves
        else:
            low = middle
    return best


def _queues(matrices: Sequence[Matrix], owners: Sequence[int], world_size: int) -> list[list[int]]:
    """Each rank's matrices in working order: heavy ones first, so that all ranks work on the same shapes at one time."""
    queues: list[list[int]] = [[] for _ in range(world_size)]
    order = sorted(range(len(matrices)), key=lambda index: (-matrices[index].flops, matrices[index].name))
    for index in order:
        queues[owners[index]].append(index)
    return queues


def _cut(matrices: Sequence[Matrix], queues: Sequence[Sequence[int]], num_waves: int) -> tuple[tuple[int, ...], ...]:
    # Half by FLOPs, half by elements: by FLOPs alone the cheap but large matrices would all fall into one last wave that no
    # budget could hold. Integers, so that every machine cuts alike.
    total_flops = sum(matrix.flops for matrix in matrices)
    total_elements = sum(matrix.num_elements for matrix in matrices)
    weights = [matrix.flops * total_elements + matrix.num_elements * total_flops for matrix in matrices]
    heaviest = max(sum(weights[index] for index in queue) for queue in queues)
    waves: list[list[int]] = [[] for _ in range(num_waves)]
    for queue in queues:
        done = 0
        for index in queue:
            # The middle of a matrix's share decides its wave.
            middle = 2 * done + weights[index]
            waves[min(middle * num_waves // (2 * heaviest) if heaviest else 0, num_waves - 1)].append(index)
            done += weights[index]
    return tuple(tuple(sorted(wave, key=lambda index: matrices[index].name)) for wave in waves if wave)
