"""Lower bounds on the load of the busiest rank, each with its proof: how far from the best possible can an assignment be?"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Reason = Literal["mean", "largest", "pigeonhole", "reachable sum", "nothing to do"]

# Sums of whole matrices that are looked at when a bound is rounded up to one of them. Beyond that many, a rank holds so many
# matrices that sums lie close together and rounding would gain nothing.
_MOST_SUMS = 50_000


@dataclass(frozen=True)
class Bound:
    """No assignment of whole matrices to ranks makes the busiest rank's load smaller than ``value``."""

    value: int
    reason: Reason
    """``mean``: the ranks share all work. ``largest``: some rank has the largest matrix. ``pigeonhole``: of so many heavy
    matrices, some ranks must take several. ``reachable sum``: a load is a sum of whole matrices, and none lies between."""


def makespan_bound(costs: Sequence[int], world_size: int) -> Bound:
    """The best of several lower bounds on the busiest rank's load, where each matrix goes to one of ``world_size`` ranks.

    For each n, of the n heaviest matrices: the ranks share them (their sum over W); and with ``n = q W + r``, the r ranks that
    have most of them have at least ``r (q + 1)``, which cost no less than the lightest of the n (Haouari and Gharbi 2004; the
    largest matrix and the pigeonhole bounds are its cases). Both are rounded up to a sum of these matrices, if the matrices are
    of few enough costs. All in integers, so that a bound is never too high by rounding.

    Args:
        costs: non-negative integers, in any order; units are the caller's.
        world_size: number of ranks, at least 1.

    Not collective.
    """
    ordered = np.sort(np.asarray(costs, dtype=np.int64))[::-1]
    total = np.concatenate(([0], np.cumsum(ordered)))
    num_costs = len(ordered)
    if num_costs == 0 or total[-1] == 0:
        return Bound(0, "nothing to do")
    heaviest = np.arange(1, num_costs + 1)
    shared = -(-total[1:] // world_size)
    quotient, rest = np.divmod(heaviest, world_size)
    crowded = -(-(total[1:] - total[heaviest - rest * (quotient + 1)]) // np.maximum(rest, 1))
    by_count = np.maximum(shared, crowded)
    best = int(by_count.max())
    reason: Reason = "pigeonhole"
    if best == shared[-1]:
        reason = "mean"
    elif best == ordered[0]:
        reason = "largest"
    kinds = [(int(cost), len(list(same))) for cost, same in groupby(ordered.tolist()) if cost > 0]
    end = 0
    for num_kinds, (_, count) in enumerate(kinds, start=1):
        end += count
        rounded = _next_sum(kinds[:num_kinds], int(by_count[:end].max()))
        if rounded is None:
            break
        if rounded > best:
            best, reason = rounded, "reachable sum"
    return Bound(best, reason)


def _next_sum(kinds: Sequence[tuple[int, int]], least: int) -> int | None:
    """The smallest sum of matrices that is at least ``least``; ``None`` when there are too many sums to look at.

    ``kinds``: cost and number of matrices of that cost, heaviest first.
    """
    sums: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
    for cost, count in kinds[:-1]:
        most = min(count, -(-least // cost))
        if len(sums) * (most + 1) > _MOST_SUMS:
            return None
        sums = np.unique((sums[:, None] + cost * np.arange(most + 1)[None, :]).ravel())
    cost, count = kinds[-1]
    added = np.maximum(-(-(least - sums) // cost), 0)
    reached = (sums + added * cost)[added <= count]
    # All matrices together are a sum, and no bound is above it.
    return int(reached.min()) if len(reached) else sum(cost * count for cost, count in kinds)
