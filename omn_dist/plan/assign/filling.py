"""Assignment by filling: each rank takes the matrices that bring it nearest to a target load."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Pattern = tuple[int, ...]
"""How many matrices of each kind (equal costs) one rank takes."""

# Limits on the search for one fullest rank, on the number of such searches and on the bisection
# over target loads. They limit the time by counts, which are the same on every machine.
_MOST_NODES = 4_000
_MOST_SEARCHES = 20
_NUM_TARGETS = 14
# With more kinds than this there are enough small ones for the longest-first rule to come close to
# the bound by itself.
_MOST_KINDS = 40
# With more patterns than this, ranks are not made alike.
_MOST_PATTERNS = 40_000


def filled_owners(cost: Integers, world_size: int, least: int, most: int) -> Integers | None:
    """Owners by filling ranks up to a target, with the busiest rank below ``most``.

    Args:
        cost: of each matrix, heaviest first.
        world_size: number of ranks.
        least: a lower bound on the busiest rank's cost: the first target.
        most: what the busiest rank has in the best assignment known.

    Returns:
        The owner of each matrix; ``None`` where no target was met.
    """
    kinds = [(int(value), len(list(same))) for value, same in groupby(cost.tolist())]
    if len(kinds) > _MOST_KINDS:
        return None
    best = None
    low, high = least - 1, most
    target = least
    for _ in range(_NUM_TARGETS):
        patterns = _fill_alike(kinds, world_size, target) or _fill(kinds, world_size, target)
        if patterns is None:
            low = target
        else:
            best, high = patterns, target
        if high - low <= 1 + least // 10_000:
            break
        target = (low + high) // 2
    if best is None:
        return None
    starts = np.concatenate(([0], np.cumsum([count for _, count in kinds])))[:-1].tolist()
    owners = np.zeros(len(cost), dtype=np.int64)
    for rank, pattern in enumerate(best):
        for kind, count in enumerate(pattern):
            owners[starts[kind] : starts[kind] + count] = rank
            starts[kind] += count
    return owners


def _fill_alike(kinds: Sequence[tuple[int, int]], world_size: int, target: int) -> list[Pattern] | None:
    """Like ``_fill``, with ranks as alike as possible: they work on equal shapes at the same time.

    Of all patterns that are full enough, each rank takes the one nearest to the mean of what is
    left for it and the ranks after it. ``None`` also where there are too many patterns.
    """
    costs = np.array([cost for cost, _ in kinds], dtype=np.int64)
    left = np.array([count for _, count in kinds], dtype=np.int64)
    patterns = _full_patterns(kinds, target, target - (world_size * target - int(costs @ left)))
    if patterns is None:
        return None
    loads = patterns @ costs
    # Small enough that no distance overflows.
    weights = costs // max(1, int(costs.max()) >> 20)
    ranks: list[Pattern] = []
    for rank in range(world_size):
        num_ranks = world_size - rank
        unused = num_ranks * target - int(costs @ left)
        room = target - loads
        possible = (patterns <= left).all(axis=1) & (room <= unused)
        if not possible.any():
            return None
        # No rank leaves much more unused than its even share, or the last ranks could not take the
        # rest.
        fair = max(-(-3 * unused // (2 * num_ranks)), int(room[possible].min()))
        distance = np.abs(num_ranks * patterns - left) @ weights
        best = int(np.where(possible & (room <= fair), distance, np.iinfo(np.int64).max).argmin())
        ranks.append(tuple(patterns[best].tolist()))
        left = left - patterns[best]
    return ranks if not left.any() else None


def _full_patterns(kinds: Sequence[tuple[int, int]], target: int, least: int) -> Integers | None:
    """``[patterns, kinds]``: all of cost ``least`` to ``target``; ``None`` for too many."""
    patterns, loads = np.zeros((1, 0), dtype=np.int64), np.zeros(1, dtype=np.int64)
    rest = sum(cost * count for cost, count in kinds)
    for cost, count in kinds:
        rest -= cost * count
        most = min(count, target // cost) if cost else count
        if len(patterns) * (most + 1) > _MOST_PATTERNS:
            return None
        counts = np.tile(np.arange(most + 1), len(patterns))
        patterns = np.column_stack((np.repeat(patterns, most + 1, axis=0), counts))
        loads = np.repeat(loads, most + 1) + cost * counts
        possible = (loads <= target) & (loads + rest >= least)
        patterns, loads = patterns[possible], loads[possible]
    return patterns


def _fill(kinds: Sequence[tuple[int, int]], world_size: int, target: int) -> list[Pattern] | None:
    """The pattern of each rank, none above ``target``; ``None`` where matrices are left over."""
    costs = [cost for cost, _ in kinds]
    left = [count for _, count in kinds]
    ranks: list[Pattern] = []
    for _ in range(_MOST_SEARCHES):
        if not any(left):
            return ranks + [(0,) * len(costs)] * (world_size - len(ranks))
        if len(ranks) == world_size:
            return None
        pattern = _fullest(costs, left, target)
        if pattern is None:
            return None
        # As many ranks take this pattern as there are matrices for.
        repeats = min(count // taken for count, taken in zip(left, pattern, strict=True) if taken)
        repeats = min(repeats, world_size - len(ranks))
        ranks += [pattern] * repeats
        left = [count - repeats * taken for count, taken in zip(left, pattern, strict=True)]
    return None


def _fullest(costs: Sequence[int], left: Sequence[int], target: int) -> Pattern | None:
    """The pattern nearest to ``target`` from below that has one of the heaviest matrices left."""
    first = next(kind for kind, count in enumerate(left) if count)
    if costs[first] > target:
        return None
    enough = target - target // 20_000
    best: tuple[int, tuple[int, ...]] = (-1, ())
    nodes = 0

    def search(kind: int, load: int, taken: tuple[int, ...]) -> None:
        nonlocal best, nodes
        nodes += 1
        if load > best[0]:
            best = (load, taken + (0,) * (len(costs) - len(taken)))
        if kind == len(costs):
            return
        most = min(left[kind], (target - load) // costs[kind]) if costs[kind] else left[kind]
        for count in range(most, (0 if kind == first else -1), -1):
            if best[0] >= enough or nodes > _MOST_NODES:
                return
            search(kind + 1, load + count * costs[kind], (*taken, count))

    search(first, 0, (0,) * first)
    return best[1]
