"""Strategies for the choice of owners, by name: the planner's own, and others for comparison."""

import re
from collections.abc import Sequence
from typing import Literal, get_args

from omn_dist.plan.assign.owners import propose_owners
from omn_dist.plan.assign.waves import natural_order
from omn_dist.plan.geometry.matrix import Matrix
from omn_dist.settings import SettingsError, unknown_name

Strategy = Literal["flops", "numel", "size-sorted-round-robin", "alpha-balanced", "layer-wise"]
"""How owners are chosen.

``flops``: the planner's own search by estimated FLOPs (:mod:`omn_dist.plan.assign.owners`), the
default.

``numel``: the same search by elements, as if every element cost the same.

``size-sorted-round-robin``: matrices sorted by elements go to the ranks in turn (NorMuon, arXiv
2510.05491).

``alpha-balanced``: layer by layer, each matrix goes to the rank that is furthest behind in a
weighted sum of FLOPs so far and of elements in this layer (after the data-parallel partition of
Canzona, arXiv 2602.06079, which weighs even compute against even buckets).

``layer-wise``: whole layers go to the ranks in turn.
"""

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

ALPHA = 0.5
"""Weight of FLOPs in ``alpha-balanced``; elements weigh 1 - ``ALPHA``."""

_LAYER = re.compile(r"^(.*?\b\d+)\b")


def strategy_by_name(name: str) -> Strategy:
    """The strategy of that name; raises ``SettingsError`` with the nearest known one."""
    for strategy in STRATEGIES:
        if strategy == name:
            return strategy
    raise SettingsError(unknown_name("strategy", name, STRATEGIES))


def owners_by(strategy: Strategy, matrices: Sequence[Matrix], world_size: int, flops: Sequence[int]) -> list[tuple[int, ...]]:
    """One or two assignments by a strategy: the owner of each matrix, in the order of ``matrices``.

    With every strategy, a matrix that some ranks hold whole is owned by one of them.

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
        layers = sorted({_layer_name(matrix.name) for matrix in matrices}, key=natural_order)
        turn_by_layer = {layer: turn for turn, layer in enumerate(layers)}
        turns = {index: turn_by_layer[_layer_name(matrix.name)] for index, matrix in enumerate(matrices)}
    owners = []
    for index, matrix in enumerate(matrices):
        candidates = matrix.candidates()
        owners.append(candidates[turns[index] % len(candidates)])
    return [tuple(owners)]


def _alpha_balanced(matrices: Sequence[Matrix], world_size: int, flops: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    by_layer: dict[str, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_layer.setdefault(_layer_name(matrix.name), []).append(index)
    # Both are compared as multiples of a rank's even share of the whole.
    even_flops, even_size = sum(flops) / world_size, sum(sizes) / world_size
    owners = [0] * len(matrices)
    flops_by_rank = [0] * world_size
    for layer in sorted(by_layer, key=natural_order):
        layer_sizes = [0] * world_size
        for index in sorted(by_layer[layer], key=lambda index: (-flops[index], matrices[index].name)):
            owners[index] = min(
                matrices[index].candidates(),
                key=lambda rank: (ALPHA * flops_by_rank[rank] / even_flops + (1 - ALPHA) * layer_sizes[rank] / even_size, rank),
            )
            flops_by_rank[owners[index]] += flops[index]
            layer_sizes[owners[index]] += sizes[index]
    return tuple(owners)


def _layer_name(name: str) -> str:
    """The name up to its first number, or all of it."""
    found = _LAYER.match(name)
    return found.group(1) if found else name
