"""Routing rules: algorithms and fields that a user chooses for parameters or whole roles."""

import fnmatch
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from omn_dist.plan.geometry.views import View
from omn_dist.roles.algorithms import FOR_MATRICES, algorithm_kind, known_algorithms
from omn_dist.roles.role import ROLES, Route, plain_name
from omn_dist.settings import SettingsError, unknown_name

_ALGORITHM = "algorithm"
Parents = Sequence[tuple[nn.Module, str]]
"""The modules that have a parameter as their own, each with the attribute's name."""


def apply_rules(
    routes: Sequence[Route], parents: Sequence[Parents], model: nn.Module, rules: Mapping[Any, str | Mapping[str, Any]]
) -> list[Route]:
    """The routes after the rules; ``parents`` are those of each route's parameter.

    Raises:
        ValueError: a key that is no role, pattern or module; an algorithm that is not registered or
            a field that it does not have; or a rule that matches nothing, contradicts another, or
            asks for a matrix where none is.

    Warns of a rule for a role that no parameter has.
    """
    if not isinstance(rules, Mapping):
        raise SettingsError(f"rules: found {rules!r}, expected a mapping of roles, name patterns, modules or module classes")
    texts = {rule: _rule_text(rule) for rule in rules}
    values = {rule: _rule_fields(texts[rule], value) for rule, value in rules.items()}
    below = {texts[rule]: _names_below(model, rule) for rule in rules if isinstance(rule, nn.Module)}
    matched = dict.fromkeys(rules, 0)
    result = []
    for route, its_parents in zip(routes, parents, strict=True):
        found = [rule for rule in rules if _matches(rule, route, its_parents, below)]
        for rule in found:
            matched[rule] += 1
        given = _merged(route, [(rule in ROLES, texts[rule], values[rule]) for rule in found])
        result.append(_follow(route, its_parents, given) if given else route)
    for rule, count in matched.items():
        if count == 0:
            _report_unused(rule, texts[rule], routes)
    return result


class _Given(NamedTuple):
    """The value of one field, and the rule that gives it."""

    value: Any
    text: str


def _rule_text(rule: Any) -> str:
    if isinstance(rule, str):
        return rule
    if isinstance(rule, nn.Module):
        return f"module {type(rule).__name__} at {id(rule):#x}"
    if isinstance(rule, type) and issubclass(rule, nn.Module):
        return f"class {rule.__name__}"
    raise SettingsError(f"rules: found the key {rule!r}, expected a role, a name pattern, a module or a module class")


def _rule_fields(text: str, value: Any) -> dict[str, Any]:
    """What a rule says, as fields of a group; an algorithm's name is the field ``algorithm``."""
    if isinstance(value, str):
        value = {_ALGORITHM: value}
    if not isinstance(value, Mapping) or not all(isinstance(field, str) for field in value):
        raise SettingsError(f"rules: found {value!r} for {text!r}, expected an algorithm's name or a mapping of fields of a group")
    fields = {field: tuple(item) if isinstance(item, list) else item for field, item in value.items()}
    if _ALGORITHM in fields:
        try:
            algorithm_kind(str(fields[_ALGORITHM]))
        except SettingsError as error:
            raise SettingsError(f"rules: {text!r} asks for an {error}") from None
    return fields


def _merged(route: Route, found: Sequence[tuple[bool, str, Mapping[str, Any]]]) -> dict[str, _Given]:
    """The fields that the rules ``(is a role, text, fields)`` give to one parameter, by name.

    A pattern, a module or a class beats a role, field by field.
    """
    merged: dict[str, _Given] = {}
    for wanted in (True, False):
        own: dict[str, _Given] = {}
        for is_role, text, fields in found:
            for field, value in fields.items() if is_role == wanted else ():
                before = own.setdefault(field, _Given(value, text))
                if before.value is not value and before.value != value:
                    values = "algorithms" if field == _ALGORITHM else f"values of {field}, {before.value!r} and {value!r}"
                    raise SettingsError(
                        f"rules: {route.name} is matched by {[before.text, text]} with different {values}; expected one"
                    )
        merged |= own
    return merged


def _report_unused(rule: Any, text: str, routes: Sequence[Route]) -> None:
    """Raise or warn: no parameter matches the rule."""
    if rule in ROLES:
        here = ", ".join(dict.fromkeys(route.role for route in routes))
        warnings.warn(f"rules: no trainable parameter has the role {text!r}; roles of this model are {here}", stacklevel=5)
        return
    names = f"names are like {routes[0].name!r}"
    if isinstance(rule, str) and rule.isidentifier():
        raise SettingsError(
            f"rules: {text!r} matches no trainable parameter ({names}), and is an {unknown_name('role', text, ROLES)}"
        )
    raise SettingsError(f"rules: pattern {text!r} matches no trainable parameter; {names}")


def _names_below(model: nn.Module, module: nn.Module) -> set[str]:
    for path, candidate in model.named_modules(remove_duplicate=False):
        if candidate is module:
            prefix = f"{path}." if path else ""
            return {plain_name(prefix + name) for name, _ in module.named_parameters(remove_duplicate=False)}
    return set()


def _matches(rule: Any, route: Route, parents: Parents, below: Mapping[str, set[str]]) -> bool:
    if isinstance(rule, str):
        return route.role == rule if rule in ROLES else any(fnmatch.fnmatchcase(name, rule) for name in route.names)
    if isinstance(rule, nn.Module):
        return bool(below[_rule_text(rule)] & set(route.names))
    return any(isinstance(module, rule) for module, _ in parents)


def _follow(route: Route, parents: Parents, given: Mapping[str, _Given]) -> Route:
    """The route of a parameter to which rules give an algorithm or fields of its group."""
    if _ALGORITHM in given:
        route = _on_algorithm(route, parents, *given[_ALGORITHM])
    fields = {field: found for field, found in given.items() if field != _ALGORITHM}
    known = _known_fields(route.algorithm)
    for field, found in fields.items():
        if known and field not in known:
            label = algorithm_kind(route.algorithm).label
            message = unknown_name("field", field, known)
            raise SettingsError(f"rules: {found.text!r} gives {route.name}, which is on {label}, an {message}")
    if not fields:
        return route
    said = ", ".join(f"{field}={found.value!r} by rule {found.text!r}" for field, found in fields.items())
    decay = fields.get("weight_decay")
    return replace(
        route,
        has_decay=route.has_decay if decay is None else bool(decay.value),
        reason=f"{route.reason}; {said}",
        fields=tuple(sorted((field, found.value) for field, found in fields.items())),
    )


def _known_fields(algorithm: str) -> tuple[str, ...]:
    """The fields that a group on ``algorithm`` may have; empty where that is not known.

    Which rule updates matrices is the preset's choice, so those may have the fields of any.
    """
    if algorithm != FOR_MATRICES:
        return algorithm_kind(algorithm).fields
    of_kinds = [kind.fields for kind in map(algorithm_kind, known_algorithms()) if kind.takes_matrices]
    return tuple(dict.fromkeys(field for fields in of_kinds for field in fields)) if all(of_kinds) else ()


def _on_algorithm(route: Route, parents: Parents, algorithm: str, text: str) -> Route:
    """The route of a parameter that the rule ``text`` gives to ``algorithm``."""
    reason = f"rule {text!r}"
    if not algorithm_kind(algorithm).takes_matrices:
        return replace(route, algorithm=algorithm, view=None, reason=reason)
    if route.is_matrix or len(route.shape) == 2:
        return replace(route, algorithm=algorithm, reason=reason)
    view = next((view for module, attribute in parents if (view := _flattened_kernel(module, attribute, route.shape))), None)
    if view is None:
        raise SettingsError(
            f"rules: {text!r} asks for {algorithm} on {route.name} of shape {route.shape}, expected a matrix; declare a view that "
            "says which matrices it holds, or give this parameter to another algorithm by its name"
        )
    return replace(route, algorithm=algorithm, view=view, reason=reason)


def _flattened_kernel(module: nn.Module, attribute: str, shape: tuple[int, ...]) -> View | None:
    """The view of a convolution's kernel: one matrix a channel group, from patches to outputs.

    ``None`` for other parameters, and where a side of the matrices is one.
    """
    if attribute != "weight" or not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return None
    num_rows, num_columns = shape[0] // module.groups, math.prod(shape[1:])
    if min(num_rows, num_columns) == 1:
        return None
    return View(shape=(num_rows, num_columns) if module.groups == 1 else (module.groups, num_rows, num_columns))
