"""Routing rules: algorithms that a user chooses for parameters, instead of those of their roles."""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from omn_dist.plan.geometry.views import View
from omn_dist.roles.algorithms import algorithm_kind
from omn_dist.roles.role import Route, plain_name
from omn_dist.settings import SettingsError

Parents = Sequence[tuple[nn.Module, str]]
"""The modules that have a parameter as their own, each with the attribute's name."""


def apply_rules(routes: Sequence[Route], parents: Sequence[Parents], model: nn.Module, rules: Mapping[Any, str]) -> list[Route]:
    """The routes after the rules; ``parents`` are those of each route's parameter.

    Raises:
        ValueError: a key that is no pattern or module, an algorithm that is not registered, or a
            rule that matches nothing, contradicts another, or asks for a matrix where none is.
    """
    matched = dict.fromkeys(map(_rule_text, rules), 0)
    for rule, algorithm in rules.items():
        _check_algorithm(_rule_text(rule), algorithm)
    below = {_rule_text(rule): _names_below(model, rule) for rule in rules if isinstance(rule, nn.Module)}
    result = []
    for route, its_parents in zip(routes, parents, strict=True):
        found = [rule for rule in rules if _matches(rule, route, its_parents, below)]
        for rule in found:
            matched[_rule_text(rule)] += 1
        texts = [_rule_text(rule) for rule in found]
        algorithms = {rules[rule] for rule in found}
        if len(algorithms) > 1:
            raise ValueError(f"rules: {route.name} is matched by {texts} with different algorithms, expected one")
        result.append(_follow(route, its_parents, texts[0], algorithms.pop()) if algorithms else route)
    for text, count in matched.items():
        if count == 0:
            raise ValueError(f"rules: pattern {text!r} matches no trainable parameter; names are like {routes[0].name!r}")
    return result


def _rule_text(rule: Any) -> str:
    if isinstance(rule, str):
        return rule
    if isinstance(rule, nn.Module):
        return f"module {type(rule).__name__} at {id(rule):#x}"
    if isinstance(rule, type) and issubclass(rule, nn.Module):
        return f"class {rule.__name__}"
    raise ValueError(f"rules: found the key {rule!r}, expected a name pattern, a module or a module class")


def _check_algorithm(text: str, algorithm: str) -> None:
    try:
        algorithm_kind(algorithm)
    except SettingsError as error:
        raise SettingsError(f"rules: {text!r} asks for an {error}") from None


def _names_below(model: nn.Module, module: nn.Module) -> set[str]:
    for path, candidate in model.named_modules(remove_duplicate=False):
        if candidate is module:
            prefix = f"{path}." if path else ""
            return {plain_name(prefix + name) for name, _ in module.named_parameters(remove_duplicate=False)}
    return set()


def _matches(rule: Any, route: Route, parents: Parents, below: Mapping[str, set[str]]) -> bool:
    if isinstance(rule, str):
        return any(fnmatch.fnmatchcase(name, rule) for name in route.names)
    if isinstance(rule, nn.Module):
        return bool(below[_rule_text(rule)] & set(route.names))
    return any(isinstance(module, rule) for module, _ in parents)


def _follow(route: Route, parents: Parents, text: str, algorithm: str) -> Route:
    """The route of a parameter that a rule gives to ``algorithm``."""
    reason = f"rule {text!r}"
    if not algorithm_kind(algorithm).takes_matrices:
        return replace(route, algorithm=algorithm, view=None, reason=reason)
    if route.is_matrix or len(route.shape) == 2:
        return replace(route, algorithm=algorithm, reason=reason)
    view = next((view for module, attribute in parents if (view := _flattened_kernel(module, attribute, route.shape))), None)
    if view is None:
        raise ValueError(
            f"rules: {text!r} asks for {algorithm} on {route.name} of shape {route.shape}, expected a matrix; declare a view that "
            "says which matrices it holds"
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
