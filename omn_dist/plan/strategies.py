"""Ways to choose owners, by name: the planner's own, and those of others, so that studies can compare them."""

import re
from collections.abc import Sequence
from typing import Literal, get_args

from omn_dist.plan.matrix import Matrix
from omn_dist.plan.owners import propose_owners
from omn_dist.settings import SettingsError, unknown_name

Strategy = Literal["flops", "numel", "size-sorted-round-robin", "alpha-balanced", "layer-wise"]
"""``flops``: the planner's own search, by estimated FLOPs (``plan.owners``), the default.

``numel``: the same search by elements, as if every element cost the same.

``size-sorted-round-robin``: matrices sorted by elements, dealt to the ranks in turn (NorMuon, arXiv 2510.05491).

``alpha-balanced``: bucket by bucket (a layer is a bucket), each matrix to the rank that is furthest behind, by a blend of FLOPs
over all buckets so far and of elements in this bucket (after the data-parallel partition of Canzona, arXiv 2602.06079, which
weighs even compute against even buckets).

``layer-wise``: whole layers, dealt to the ranks in turn."""

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

ALPHA = 0.5
"""Weight of FLOPs against bucket sizes in ``alpha-balanced``; 1 is FLOPs alone."""

_LAYER = re.compile(r"^(.*?\b\d+)\b")


def strategy_by_name(name: str) -> Strategy:
    """The strategy of that name; raises ``SettingsError`` with the nearest known one."""
    for strategy in STRATEGIES:
        if strategy == name:
            return strategy
    raise SettingsError(unknown_name("strategy", name, STRATEGIES))


def owners_by(strategy: Strategy, matrices: Sequence[Matrix], world_size: int, flops: Sequence[int]) -> list[tuple[int, ...]]:
    """The assignments that a strategy proposes, one or two: the owner of each matrix, in the order of ``matrices``.

    Whatever the strategy, a matrix that lies whole on some ranks stays with them.

    Args:
        strategy: how to choose.
        matrices: on ``world_size`` ranks, with unique names.
        world_size: number of ranks.
        flops: estimated FLOPs of each matrix.
    """
    sizes = [matrix.num_elements for matrix in matrices]
    if strategy == "flops":
        return propose_owners(matrices, world_size, flops)
    if strategy == "numel":
        return propose_owners(matrices, world_size, sizes)[:1]
    if strategy == "alpha-balanced":
        return [_alpha_balanced(matrices, world_size, flops, sizes)]
    if strategy == "size-sorted-round-robin":
        order = sorted(range(len(matrices)), key=lambda index: (-sizes[index], matrices[index].name))
        turns = {index: turn for turn, index in enumerate(order)}
    else:
        layers = sorted({_layer(matrix.name) for matrix in matrices}, key=_natural)
        turn_by_layer = {layer: turn for turn, layer in enumerate(layers)}
        turns = {index: turn_by_layer[_layer(matrix.name)] for index, matrix in enumerate(matrices)}
    owners = []
    for index, matrix in enumerate(matrices):
        candidates = matrix.candidates()
        owners.append(candidates[turns[index] % len(candidates)])
    return [tuple(owners)]


def _alpha_balanced(matrices: Sequence[Matrix], world_size: int, flops: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    buckets: dict[str, list[int]] = {}
    for index, matrix in enumerate(matrices):
        buckets.setdefault(_layer(matrix.name), []).append(index)
    # Both are compared as shares of one rank's fair part of the whole.
    flops_part, size_part = sum(flops) / world_size, sum(sizes) / world_size
    owners = [0] * len(matrices)
    work = [0] * world_size
    for layer in sorted(buckets, key=_natural):
        held = [0] * world_size
        for index in sorted(buckets[layer], key=lambda index: (-flops[index], matrices[index].name)):
            owners[index] = min(
                matrices[index].candidates(),
                key=lambda rank: (ALPHA * work[rank] / flops_part + (1 - ALPHA) * held[rank] / size_part, rank),
            )
            work[owners[index]] += flops[index]
            held[owners[index]] += sizes[index]
    return tuple(owners)


def _layer(name: str) -> str:
    """The name up to its first number, or all of it."""
    found = _LAYER.match(name)
    return found.group(1) if found else name


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts numbers in names by value: layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
