"""Rules: what a user says about parameters, stronger than roles, and checked as strictly."""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from omn_dist.plan.views import View
from omn_dist.roles.role import Algorithm, Route, plain_name

Owners = Sequence[tuple[nn.Module, str]]


def apply_rules(routes: Sequence[Route], owners: Sequence[Owners], model: nn.Module, rules: Mapping[Any, Algorithm]) -> list[Route]:
    """Routes with the rules applied; ``owners`` are the modules that hold each parameter, with the attribute.

    Raises:
        ValueError: a rule that is no pattern or module, matches nothing, conflicts with another, or cannot be followed.
    """
    matched = dict.fromkeys(map(_text, rules), 0)
    below = {_text(rule): _names_below(model, rule) for rule in rules if isinstance(rule, nn.Module)}
    result = []
    for route, its_owners in zip(routes, owners, strict=True):
        found = [rule for rule in rules if _matches(rule, route, its_owners, below)]
        for rule in found:
            matched[_text(rule)] += 1
        texts = [_text(rule) for rule in found]
        algorithms = {rules[rule] for rule in found}
        if len(algorithms) > 1:
            raise ValueError(f"rules: {route.name} is matched by {texts} with different algorithms, expected one")
        result.append(_follow(route, its_owners, texts[0], algorithms.pop()) if algorithms else route)
    for text, count in matched.items():
        if count == 0:
            raise ValueError(f"rules: pattern {text!r} matches no trainable parameter; names are like {routes[0].name!r}")
    return result


def _text(rule: Any) -> str:
    if isinstance(rule, str):
        return rule
    if isinstance(rule, nn.Module):
        return f"module {type(rule).__name__} at {id(rule):#x}"
    if isinstance(rule, type) and issubclass(rule, nn.Module):
        return f"class {rule.__name__}"
    raise ValueError(f"rules: found the key {rule!r}, expected a name pattern, a module or a module class")


def _names_below(model: nn.Module, module: nn.Module) -> set[str]:
    for path, candidate in model.named_modules(remove_duplicate=False):
        if candidate is module:
            prefix = f"{path}." if path else ""
            return {plain_name(prefix + name) for name, _ in module.named_parameters(remove_duplicate=False)}
    return set()


def _matches(rule: Any, route: Route, owners: Owners, below: Mapping[str, set[str]]) -> bool:
    if isinstance(rule, str):
        return any(fnmatch.fnmatchcase(name, rule) for name in route.names)
    if isinstance(rule, nn.Module):
        return bool(below[_text(rule)] & set(route.names))
    return any(isinstance(module, rule) for module, _ in owners)


def _follow(route: Route, owners: Owners, text: str, algorithm: Algorithm) -> Route:
    if algorithm not in ("muon", "adamw"):
        raise ValueError(f"rules: {text!r} asks for {algorithm!r}, expected 'muon' or 'adamw'")
    reason = f"rule {text!r}"
    if algorithm == "adamw":
        return replace(route, algorithm=algorithm, view=None, reason=reason)
    if route.algorithm == "muon":
        return replace(route, reason=reason)
    if len(route.shape) == 2:
        return replace(route, algorithm=algorithm, reason=reason)
    view = next((view for module, attribute in owners if (view := _flattened_kernel(module, attribute, route.shape))), None)
    if view is None:
        raise ValueError(
            f"rules: {text!r} asks for muon on {route.name} of shape {route.shape}, expected a matrix; declare a view that says "
            "which matrices it holds"
        )
    return replace(route, algorithm=algorithm, view=view, reason=reason)


def _flattened_kernel(module: nn.Module, attribute: str, shape: tuple[int, ...]) -> View | None:
    """A convolution as matrices from patches to outputs, one for each group of channels; ``None`` where there is no matrix."""
    plain = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and attribute == "weight"
    if not plain or not isinstance(module, nn.modules.conv._ConvNd):
        return None
    num_rows, num_columns = shape[0] // module.groups, math.prod(shape[1:])
    if min(num_rows, num_columns) == 1:
        return None
    return View(shape=(num_rows, num_columns) if module.groups == 1 else (module.groups, num_rows, num_columns))
