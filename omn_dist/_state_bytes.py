"""Exact bytes of optimizer state, from shapes and dtypes alone: what a run record and a plan say before anything is allocated."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from omn_dist._row_moment import row_moment_shape

_STEP_BYTES = 4
"""AdamW's fp32 step counter, one a parameter."""


def state_bytes(parameter: Tensor, group: Mapping[str, Any]) -> int:
    """Bytes of the state of one whole parameter, all shards together (copies counted once).

    For m x n elements of b bytes: ``adamw`` 2 m n b + 4, ``muon`` and ``vector`` m n b, ``normuon`` m n b + 4 m: the row moment is
    fp32. Works on the meta device.
    """
    elements = parameter.numel() * parameter.element_size()
    if group["algorithm"] == "adamw":
        return 2 * elements + _STEP_BYTES
    if group["algorithm"] == "normuon":
        return elements + 4 * math.prod(row_moment_shape(parameter, group))
    return elements


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
