"""Parameter groups: each trainable parameter once, with its algorithm, weight decay and view."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from omn_dist.plan.geometry.views import View
from omn_dist.roles.algorithms import FOR_MATRICES, FOR_OTHERS, algorithm_kind
from omn_dist.roles.role import Route, plain_name
from omn_dist.roles.routes import route_parameters


def build_parameter_groups(
    model: nn.Module, weight_decay: float = 0.0, *, rules: Mapping[Any, str] | None = None
) -> list[dict[str, Any]]:
    """The parameter groups of a model for ``DualOptimizer``: Muon for matrices, AdamW for the rest.

    Args:
        model: before or after ``fully_shard``, or on the meta device; parameter names are the same.
        weight_decay: decoupled decay of matrices and of the other parameters that decay (routers,
            gates, convolutions). Embeddings, heads, norms, biases and vectors never decay.
        rules: glob patterns on names, modules or module classes, each with the name of a registered
            algorithm (``"muon"``, ``"adamw"``, your own ...). A rule overrides the role.

    Returns:
        Groups of matrices first: without a view, then one group a view in order of first
        appearance. Then AdamW with decay and without. Other algorithms that rules name follow
        those of their kind in the same way. Empty groups are left out. A group has ``params``,
        ``param_names`` in the same order, ``algorithm`` and ``weight_decay``. A view adds
        ``muon_shape`` and its other fields (plain data, see
        :class:`~omn_dist.plan.geometry.views.View`), and ``adamw_weight_decay`` if some of its rows
        belong to no matrix. A tied weight appears once; frozen parameters do not appear.

    Raises:
        ValueError: nothing is trainable, a rule cannot be applied, or a view does not fit the
            parameter or contradicts another view.

    Warns when the model has no matrix, and when AdamW gets fused or stacked matrices because their
    layout is not known. Not collective.
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay: found {weight_decay!r}, expected a number >= 0")
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    routes = route_parameters(model, rules)
    _warn(routes)
    groups: list[dict[str, Any]] = []
    for (algorithm, has_decay, view), found in _members(routes).items():
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


def _warn(routes: Sequence[Route]) -> None:
    """Warn about models without a matrix and about matrices in an unknown layout."""
    if not any(route.is_matrix for route in routes):
        used = " and ".join(dict.fromkeys(algorithm_kind(route.algorithm).label for route in routes))
        matrix_label = algorithm_kind(FOR_MATRICES).label
        warnings.warn(
            f"no matrix for {matrix_label} among {len(routes)} trainable parameters: all of them are on {used}",
            stacklevel=3,
        )
    unknown = [route for route in routes if route.role in ("fused", "stack") and not route.reason.startswith("rule")]
    if unknown:
        warnings.warn(
            f"{len(unknown)} of {len(routes)} parameters hold several matrices in an unknown order, so "
            f"{algorithm_kind(FOR_OTHERS).label} updates them: {', '.join(route.name for route in unknown[:3])}"
            f"{', ...' if len(unknown) > 3 else ''}; declare their views with omn_dist.roles.declare_view, or choose an algorithm "
            "with rules",
            stacklevel=3,
        )


def _members(routes: Sequence[Route]) -> dict[tuple[str, bool, View | None], list[Route]]:
    """The routes of each group, by algorithm, decay and view, in the order of the groups."""
    found = dict.fromkeys([FOR_MATRICES, FOR_OTHERS, *(route.algorithm for route in routes)])
    members: dict[tuple[str, bool, View | None], list[Route]] = {}
    for algorithm in sorted(found, key=lambda name: not algorithm_kind(name).takes_matrices):
        own = [route for route in routes if route.algorithm == algorithm]
        if algorithm_kind(algorithm).takes_matrices:
            members[algorithm, True, None] = []
            for route in own:
                members.setdefault((algorithm, True, route.view), []).append(route)
        else:
            for has_decay in (True, False):
                members[algorithm, has_decay, None] = [route for route in own if route.has_decay == has_decay]
    return members
