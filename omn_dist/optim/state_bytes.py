"""Bytes of the optimizer's state: of one parameter, of groups, and as a line of text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from omn_dist.optim.row_state import row_shape
from omn_dist.optim.rules.registry import algorithm_of
from omn_dist.optim.state import has_master, kept_tensors

_FLOAT32_BYTES = 4


def state_bytes(parameter: Tensor, group: Mapping[str, Any], *, master_weights: bool = False) -> int:
    """Bytes of the state of one whole parameter, all shards together (copies counted once).

    For m x n elements of b bytes: AdamW 2 m n b + 4, Muon and vectors m n b, NorMuon m n b + 4 m. A
    view with rows on AdamW adds what AdamW has. ``master_weights`` makes b = 4 for half-precision
    parameters and adds 4 m n for the masters. Works on the meta device.
    """
    with_master = has_master(parameter, master_weights=master_weights)
    itemsize = _FLOAT32_BYTES if with_master else parameter.element_size()
    total = _FLOAT32_BYTES * parameter.numel() if with_master else 0
    for _, extent in kept_tensors(group):
        if extent == "elements":
            total += itemsize * parameter.numel()
        else:
            total += _FLOAT32_BYTES * (math.prod(row_shape(parameter, group)) if extent == "rows" else 1)
    return total


def state_bytes_by_algorithm(groups: Sequence[Mapping[str, Any]], matrix_algorithm: str = "muon") -> dict[str, int]:
    """Bytes of the state of all groups, by algorithm in order of first appearance.

    Args:
        groups: of ``build_parameter_groups`` or of an optimizer.
        matrix_algorithm: the preset's ``algorithm``.
    """
    total: dict[str, int] = {}
    for group in groups:
        algorithm = algorithm_of(group["algorithm"], matrix_algorithm)
        of_group = sum(state_bytes(parameter, {**group, "algorithm": algorithm}) for parameter in group["params"])
        total[algorithm] = total.get(algorithm, 0) + of_group
    return total


def format_state_bytes(groups: Sequence[Mapping[str, Any]], matrix_algorithm: str = "muon") -> str:
    """One line with the bytes of all ranks together, whole and by algorithm."""
    by_algorithm = state_bytes_by_algorithm(groups, matrix_algorithm)
    parts = ", ".join(f"{algorithm} {count:,}" for algorithm, count in by_algorithm.items())
    return f"optimizer state bytes, all ranks together: {sum(by_algorithm.values()):,} ({parts})"
