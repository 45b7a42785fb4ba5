"""Exact bytes of optimizer state, from shapes and dtypes alone: what a run record and a plan say before anything is allocated."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from omn_dist._row_moment import row_moment_shape
from omn_dist.algorithms.row_numbers import MATRIX_ALGORITHMS
from omn_dist.plan.views import View

_MASTER_BYTES = 4
_STEP_BYTES = 4
"""AdamW's fp32 step counter, one a parameter."""


def state_bytes(parameter: Tensor, group: Mapping[str, Any], *, master_weights: bool = False) -> int:
    """Bytes of the state of one whole parameter, all shards together (copies counted once).

    For m x n elements of b bytes: ``adamw`` 2 m n b + 4, ``muon`` and ``vector`` m n b, ``normuon`` m n b + 4 m: the row moment is
    fp32. A view with rows for AdamW adds what AdamW has. ``master_weights`` makes b = 4 for half-precision parameters and adds
    4 m n for the masters. Works on the meta device.
    """
    has_master = master_weights and parameter.element_size() < _MASTER_BYTES
    elements = parameter.numel() * (_MASTER_BYTES if has_master else parameter.element_size())
    total = elements if has_master else 0
    view = View.from_group(group) if group["algorithm"] in MATRIX_ALGORITHMS else None
    if group["algorithm"] == "adamw" or (view is not None and view.has_adamw_rows):
        total += 2 * elements + _STEP_BYTES
    if group["algorithm"] != "adamw":
        total += elements
    if group["algorithm"] == "normuon":
        total += 4 * math.prod(row_moment_shape(parameter, group))
    return total


def state_bytes_by_algorithm(groups: Sequence[Mapping[str, Any]], matrix_algorithm: str = "muon") -> dict[str, int]:
    """Bytes of the state of all groups, by algorithm in order of first appearance.

    Args:
        groups: of ``build_parameter_groups`` or of an optimizer.
        matrix_algorithm: what the preset runs on groups whose ``algorithm`` is ``"muon"``.
    """
    total: dict[str, int] = {}
    for group in groups:
        algorithm = matrix_algorithm if group["algorithm"] == "muon" else group["algorithm"]
        of_group = sum(state_bytes(parameter, {**group, "algorithm": algorithm}) for parameter in group["params"])
        total[algorithm] = total.get(algorithm, 0) + of_group
    return total


def format_state_bytes(groups: Sequence[Mapping[str, Any]], matrix_algorithm: str = "muon") -> str:
    """One line with the bytes of all ranks together, whole and by algorithm."""
    by_algorithm = state_bytes_by_algorithm(groups, matrix_algorithm)
    parts = ", ".join(f"{algorithm} {count:,}" for algorithm, count in by_algorithm.items())
    return f"optimizer state bytes, all ranks together: {sum(by_algorithm.values()):,} ({parts})"
