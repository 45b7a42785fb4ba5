"""The state of each parameter: the tensors that its rule keeps, their dtypes and their bytes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from omn_dist.optim.row_state import row_shape, zeros_for_rows
from omn_dist.optim.rules.registry import FOR_ROWS, algorithm_of, rule_by_name
from omn_dist.optim.rules.rule import StateTensor
from omn_dist.plan.geometry.views import View

MASTER = "master"
"""State key of the fp32 copy of a half-precision parameter."""
_FLOAT32_BYTES = 4


def kept_tensors(group: Mapping[str, Any]) -> Iterator[StateTensor]:
    """What the rule of a group keeps for each parameter, and what the rule of its AdamW rows keeps.

    Rows of a matrix parameter that AdamW updates have their moments in tensors of the parameter's
    shape: those reshard like it, and cost two more of its size.
    """
    rule = rule_by_name(group["algorithm"])
    view = View.from_group(group)
    yield from rule.state(group)
    if view is not None and view.has_adamw_rows:
        yield from FOR_ROWS.state(group)


def allocate_state(state: dict[str, Any], name: str, parameter: Tensor, group: Mapping[str, Any], *, master_weights: bool) -> None:
    """Fill the empty ``state`` of one parameter with zeros, and with its master. Not collective.

    State exists from construction on: if it came with the first step, torch's state-dict helpers
    would run a hidden step. It has the dtype of the parameter, fp32 where there is a master; row
    numbers and counters are fp32.
    """
    source = parameter.detach()
    if master_weights and source.dtype.itemsize < _FLOAT32_BYTES:
        source = state[MASTER] = source.float()
    for key, extent in kept_tensors(group):
        if extent == "elements":
            state[key] = torch.zeros_like(source)
        elif extent == "rows":
            state[key] = zeros_for_rows(name, parameter, group)
        else:
            state[key] = torch.zeros((), dtype=torch.float32, device=parameter.device if parameter.is_cuda else "cpu")


def state_bytes(parameter: Tensor, group: Mapping[str, Any], *, master_weights: bool = False) -> int:
    """Bytes of the state of one whole parameter, all shards together (copies counted once).

    For m x n elements of b bytes: AdamW 2 m n b + 4, Muon and vectors m n b, NorMuon m n b + 4 m. A
    view with rows on AdamW adds what AdamW has. ``master_weights`` makes b = 4 for half-precision
    parameters and adds 4 m n for the masters. Works on the meta device.
    """
    has_master = master_weights and parameter.element_size() < _FLOAT32_BYTES
    itemsize = _FLOAT32_BYTES if has_master else parameter.element_size()
    total = _FLOAT32_BYTES * parameter.numel() if has_master else 0
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
