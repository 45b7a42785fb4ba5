"""Parameter groups: every trainable parameter exactly once, with the algorithm and the decay that its role asks for."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from omn_dist.roles.routes import Algorithm, plain_name, route_parameters


def build_parameter_groups(
    model: nn.Module, weight_decay: float = 0.0, *, rules: Mapping[str, Algorithm] | None = None
) -> list[dict[str, Any]]:
    """The groups of a model for ``DualOptimizer``: projections on Muon, everything else on AdamW.

    Args:
        model: before or after ``fully_shard``, or on the meta device: the names are the same.
        weight_decay: decoupled decay of projections and of the AdamW parameters that decay (routers, gates, convolutions).
            Embeddings, heads, norms, biases and vectors never decay.
        rules: glob patterns on names to ``"muon"`` or ``"adamw"``, stronger than roles.

    Returns:
        At most three groups in a fixed order (Muon, AdamW with decay, AdamW without), empty ones left out; each with ``params``,
        parallel ``param_names``, ``algorithm`` and ``weight_decay``. A tied weight appears once, frozen ones not at all.

    Raises:
        ValueError: nothing is trainable, or a rule cannot be followed.

    Warns when no parameter is on Muon. Not collective.
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay: found {weight_decay!r}, expected a number >= 0")
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    routes = route_parameters(model, rules)
    if not any(route.algorithm == "muon" for route in routes):
        warnings.warn(f"no matrix for Muon among {len(routes)} trainable parameters: all of them are on AdamW", stacklevel=2)
    groups: list[dict[str, Any]] = []
    for algorithm, has_decay in (("muon", None), ("adamw", True), ("adamw", False)):
        names = [route.name for route in routes if route.algorithm == algorithm and has_decay in (None, route.has_decay)]
        if names:
            groups.append(
                {
                    "params": [parameters[name] for name in names],
                    "param_names": names,
                    "algorithm": algorithm,
                    "weight_decay": weight_decay if has_decay is not False else 0.0,
                }
            )
    return groups
