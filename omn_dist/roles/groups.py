"""Parameter groups: every trainable parameter exactly once, with the algorithm, the decay and the view that its role asks for."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from omn_dist.plan.views import View
from omn_dist.roles.role import Algorithm, Route, plain_name
from omn_dist.roles.routes import route_parameters


def build_parameter_groups(
    model: nn.Module, weight_decay: float = 0.0, *, rules: Mapping[Any, Algorithm] | None = None
) -> list[dict[str, Any]]:
    """The groups of a model for ``DualOptimizer``: matrices on Muon, everything else on AdamW.

    Args:
        model: before or after ``fully_shard``, or on the meta device: the names are the same.
        weight_decay: decoupled decay of matrices and of the AdamW parameters that decay (routers, gates, convolutions).
            Embeddings, heads, norms, biases and vectors never decay.
        rules: glob patterns on names, modules or module classes to ``"muon"`` or ``"adamw"``, stronger than roles.

    Returns:
        Muon groups, one without a view and one for each view in order of first appearance, then AdamW with decay and AdamW
        without; empty ones are left out. Each has ``params``, parallel ``param_names``, ``algorithm`` and ``weight_decay``; with a
        view also ``muon_shape`` and what else describes it (plain data, see :class:`~omn_dist.plan.views.View`), and
        ``adamw_weight_decay`` for rows that are no matrix. A tied weight appears once, frozen ones not at all.

    Raises:
        ValueError: nothing is trainable, a rule cannot be followed, or a view does not fit or conflicts.

    Warns when no parameter is on Muon, and when fused or stacked matrices are on AdamW because nothing says how they lie. Not
    collective.
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay: found {weight_decay!r}, expected a number >= 0")
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    routes = route_parameters(model, rules)
    if not any(route.algorithm == "muon" for route in routes):
        warnings.warn(f"no matrix for Muon among {len(routes)} trainable parameters: all of them are on AdamW", stacklevel=2)
    unknown = [route for route in routes if route.role in ("fused", "stack") and not route.reason.startswith("rule")]
    if unknown:
        warnings.warn(
            f"{len(unknown)} of {len(routes)} parameters hold several matrices in an order that nothing says, and stay on AdamW: "
            f"{', '.join(route.name for route in unknown[:3])}{', ...' if len(unknown) > 3 else ''}; declare their views with "
            "omn_dist.roles.declare_view, or choose with rules",
            stacklevel=2,
        )
    members: dict[tuple[str, bool, View | None], list[Route]] = {("muon", True, None): []}
    for route in routes:
        if route.algorithm == "muon":
            members.setdefault(("muon", True, route.view), []).append(route)
    for has_decay in (True, False):
        members["adamw", has_decay, None] = [
            route for route in routes if route.algorithm == "adamw" and route.has_decay == has_decay
        ]
    groups: list[dict[str, Any]] = []
    for (algorithm, has_decay, view), found in members.items():
        if found:
            decay = weight_decay if has_decay else 0.0
            group = {
                "params": [parameters[route.name] for route in found],
                "param_names": [route.name for route in found],
                "algorithm": algorithm,
                "weight_decay": decay,
            }
            if view is not None:
                group |= view.as_fields()
                if view.has_adamw_rows:
                    group["adamw_weight_decay"] = decay
            groups.append(group)
    return groups
