"""Lower bounds on the load of the busiest rank, to measure how good an assignment is."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Reason = Literal["mean", "largest", "pigeonhole", "reachable sum", "nothing to do"]

# Most sums of whole matrices that are looked at to round a bound up to one of them. Where there are
# more, sums are so close together that rounding gains nothing.
_MOST_SUMS = 50_000


@dataclass(frozen=True)
class Bound:
    """In every assignment of whole matrices the busiest rank has at least ``value``."""

    value: int
    reason: Reason
    """Why.

    ``mean``: the ranks share all work. ``largest``: some rank has the largest matrix.
    ``pigeonhole``: there are so many heavy matrices that some ranks have several. ``reachable
    sum``: a load is a sum of whole matrices, and there is none between the other bounds and this
    one.
    """


def makespan_bound(costs: Sequence[int], world_size: int) -> Bound:
    """The best of several lower bounds on the busiest rank's load, with one owner a matrix.

    For the n heaviest matrices, for each n, there are two bounds. The W ranks share their sum. And
    with ``n = q W + r``, some r ranks have at least ``r (q + 1)`` of them, which cost no less than
    the ``r (q + 1)`` lightest of the n (Haouari and Gharbi 2004); the bounds by the largest matrix
    and by the pigeonhole principle are special cases. Where matrices have few different costs, a
    bound is rounded up to a sum of these matrices. All numbers are integers, so rounding never
    makes a bound too high.

    Args:
        costs: non-negative integers in any unit, in any order.
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
    """The smallest sum of matrices from ``least`` on; ``None`` where there are too many sums.

    Args:
        kinds: cost and number of matrices of each kind, heaviest first.
        least: a lower bound that is not above the sum of all matrices.
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
    # The sum of all matrices is one, and no bound is above it.
    return int(reached.min()) if len(reached) else sum(cost * count for cost, count in kinds)
