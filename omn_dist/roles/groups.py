"""Parameter groups: each trainable parameter once, with its algorithm, weight decay and view."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from omn_dist.plan.geometry.views import View
from omn_dist.roles.algorithms import FOR_MATRICES, FOR_OTHERS, algorithm_kind
from omn_dist.roles.role import Role, Route, plain_name
from omn_dist.roles.routes import route_parameters
from omn_dist.roles.ties import warn_of_lost_ties
from omn_dist.settings import SettingsError, convert

_Key = tuple[str, bool, View | None, tuple[tuple[str, Any], ...]]
"""What the parameters of a group share: algorithm, whether they decay, view, fields of rules."""


def build_parameter_groups(
    model: nn.Module, weight_decay: float | None = None, *, rules: Mapping[Any, str | Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """The parameter groups of a model for ``DualOptimizer``: Muon for matrices, AdamW for the rest.

    Args:
        model: before or after ``fully_shard``, or on the meta device; parameter names are the same.
        weight_decay: decoupled decay of matrices and of the other parameters that decay (routers,
            gates, convolutions). ``None`` leaves it to the optimizer: its keyword, else its preset.
            Embeddings, heads, norms, biases and vectors never decay.
        rules: roles (such as ``"embedding"``), glob patterns on names, modules or module classes,
            each with the name of a registered algorithm (``"muon"``, ``"adamw"``, your own ...) or
            with a mapping of fields of a group (``{"lr": 0.3}``), ``algorithm`` among them. What a
            pattern, a module or a class says beats what a role says.

    Returns:
        Groups of matrices first: without a view, then one group a view in order of first
        appearance. Then AdamW with decay and without. Other algorithms that rules name follow
        those of their kind in the same way. Parameters to which rules give fields are in groups of
        their own, after those of their kind. Empty groups are left out. A group has ``params``,
        ``param_names`` in the same order, ``algorithm``, the fields of rules, and ``weight_decay``:
        0.0 if its parameters never decay, else as given, or absent. A view adds ``muon_shape`` and
        its other fields (plain data, see :class:`~omn_dist.plan.geometry.views.View`), and
        ``adamw_weight_decay``, if given, where some of its rows belong to no matrix. A tied weight
        appears once; frozen parameters do not appear.

    Raises:
        ValueError: nothing is trainable, a rule cannot be applied, or a view does not fit the
            parameter or contradicts another view.

    Warns when AdamW gets nearly everything that could be a matrix, when AdamW gets fused or stacked
    matrices because their layout is not known, and when an embedding and a head have lost their
    tie. Not collective.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: found {type(model).__name__}, expected a torch.nn.Module")
    weight_decay = convert(float | None, weight_decay, path="weight_decay")
    if weight_decay is not None and not weight_decay >= 0:
        raise SettingsError(f"weight_decay: found {weight_decay!r}, expected a number >= 0, or None")
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    routes = route_parameters(model, rules)
    _warn(routes)
    warn_of_lost_ties(model, routes)
    given: dict[str, Any] = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups: list[dict[str, Any]] = []
    for (algorithm, has_decay, view, fields), found in _members(routes).items():
        group = {
            "params": [parameters[route.name] for route in found],
            "param_names": [route.name for route in found],
            "algorithm": algorithm,
            **(given if has_decay else {"weight_decay": 0.0}),
        }
        if view is not None:
            group |= view.as_fields()
            if view.has_adamw_rows:
                group |= {f"adamw_{field}": value for field, value in given.items()}
        groups.append(group | dict(fields))
    return groups


_INNER_ROLES = ("projection", "expert", "router", "gate", "low_rank", "convolution")
"""Roles of weights inside of a network that could be matrices."""
_MOST = 0.9
"""Share of inner weights on AdamW from which a warning says so."""


def _warn(routes: Sequence[Route]) -> None:
    """Warn about models with few matrices, and about matrices in an unknown layout."""
    on_others: dict[Role, int] = {}
    for route in routes:
        if route.role in _INNER_ROLES and not route.is_matrix and not route.reason.startswith("rule"):
            on_others[route.role] = on_others.get(route.role, 0) + route.num_elements
    matrix_label, other_label = algorithm_kind(FOR_MATRICES).label, algorithm_kind(FOR_OTHERS).label
    hint = ""
    if on_others:
        role = max(on_others, key=on_others.__getitem__)
        hint = (
            f"; to give {role} weights ({on_others[role]:,} elements) to {matrix_label}, use rules={{{role!r}: {FOR_MATRICES!r}}}"
        )
    num_others, num_in_matrices = sum(on_others.values()), sum(route.num_elements for route in routes if route.is_matrix)
    if not num_in_matrices:
        used = " and ".join(dict.fromkeys(algorithm_kind(route.algorithm).label for route in routes))
        warnings.warn(
            f"no matrix for {matrix_label} among {len(routes)} trainable parameters: all of them are on {used}{hint}", stacklevel=3
        )
    elif num_others >= _MOST * (num_others + num_in_matrices):
        share = num_others / (num_others + num_in_matrices)
        warnings.warn(
            f"{other_label} updates {share:.1%} of the elements of inner weights and {matrix_label} only {1 - share:.1%}{hint}",
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


def _members(routes: Sequence[Route]) -> dict[_Key, list[Route]]:
    """The routes of each group, by what its parameters share, in the order of the groups."""
    found = dict.fromkeys([FOR_MATRICES, FOR_OTHERS, *(route.algorithm for route in routes)])
    order = sorted(found, key=lambda name: not algorithm_kind(name).takes_matrices)
    members: dict[_Key, list[Route]] = {}
    for route in routes:
        # Matrices decay, whatever their role.
        key = (route.algorithm, route.has_decay or route.is_matrix, route.view, route.fields)
        members.setdefault(key, []).append(route)

    def place(key: _Key) -> tuple[int, bool, bool, bool]:
        algorithm, has_decay, view, fields = key
        return order.index(algorithm), not has_decay, bool(fields), view is not None

    return {key: members[key] for key in sorted(members, key=place)}
