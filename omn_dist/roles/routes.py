"""Roles decided by module type and structure first, by name second; each decision with its reason.

Only types, names and dims are looked at, never values or local shapes: the answer is the same on the meta device, before and
after ``fully_shard``.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

Algorithm = Literal["muon", "adamw"]
Role = Literal["projection", "embedding", "head", "router", "gate", "norm", "bias", "vector", "convolution", "stack"]

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|module)\.(?=.)")
_HEAD_NAMES = {"lm_head", "head", "output", "score", "classifier", "embed_out", "unembed", "output_layer"}
_EMBEDDING_NAMES = re.compile(r"embed|^wte$|^wpe$|position|^pos_|lookup|table")
_ROUTER_NAMES = {"router", "gate", "wg"}
_GATE_NAMES = re.compile(r"(?:^|_)(?:shared_expert_gate|output_gate|out_gate|g_proj|gate_weight)$")


@dataclass(frozen=True)
class Route:
    """Where one parameter goes, and why."""

    names: tuple[str, ...]
    """Every name under which the model knows it; the first is the one that groups carry."""
    shape: tuple[int, ...]
    role: Role
    algorithm: Algorithm
    has_decay: bool
    reason: str

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def num_elements(self) -> int:
        """Elements of the whole parameter."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def route_parameters(model: nn.Module, rules: Mapping[str, Algorithm] | None = None) -> list[Route]:
    """The route of every trainable parameter, once, in the order of ``model.named_parameters()``.

    Args:
        model: on any device, meta included, sharded or not.
        rules: glob patterns on names to algorithms, stronger than roles. Each must match, and no two may disagree.

    Raises:
        ValueError: nothing is trainable, or a rule matches nothing, conflicts, or asks for Muon on a tensor that is no matrix.

    Not collective.
    """
    routes = [_route(names, owners) for names, owners in _trainable(model)]
    if not routes:
        raise ValueError("model: no trainable parameter (all frozen, or none at all), expected at least one")
    return _override(routes, rules or {})


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers (torch.compile, activation checkpointing, DDP) put into it."""
    return _WRAPPERS.sub("", name)


def _trainable(model: nn.Module) -> Iterator[tuple[tuple[str, ...], list[tuple[nn.Module, str]]]]:
    """Each trainable parameter's names, and its owners as (module, attribute), in order of first appearance."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            path, _, attribute = name.rpartition(".")
            names.setdefault(id(parameter), []).append(plain_name(name))
            owners.setdefault(id(parameter), []).append((modules[path], attribute))
    for identity, found in names.items():
        yield tuple(dict.fromkeys(found)), owners[identity]


def _route(names: tuple[str, ...], owners: list[tuple[nn.Module, str]]) -> Route:
    parameter = getattr(*owners[0])
    shape = tuple(parameter.shape)

    def to(role: Role, algorithm: Algorithm, has_decay: bool, reason: str) -> Route:
        return Route(names, shape, role, algorithm, has_decay, reason)

    for module, attribute in owners:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            tied = f", tied to {names[-1]}" if len(names) > 1 else ""
            return to("embedding", "adamw", False, f"weight of {type(module).__name__}{tied}")
        if _is_norm(module):
            return to("norm", "adamw", False, f"parameter of {type(module).__name__}")
        if attribute == "bias" or attribute.endswith("_bias"):
            return to("bias", "adamw", False, "bias")
        if isinstance(module, nn.modules.conv._ConvNd):
            return to("convolution", "adamw", True, f"kernel of {type(module).__name__}")
    if len(shape) < 2 or min(shape) <= 1:
        return to("vector", "adamw", False, f"{len(shape)} dims, a side of one at most: no matrix geometry")
    # The module's own name: the last part of the path for module weights, the attribute for bare parameters.
    for name in names:
        parts = name.split(".")
        leaf = parts[-2] if parts[-1] == "weight" and len(parts) > 1 else parts[-1]
        if leaf in _HEAD_NAMES:
            return to("head", "adamw", False, f"output head by its name {leaf!r}")
        if leaf in _ROUTER_NAMES:
            return to("router", "adamw", True, f"router by its name {leaf!r}")
        if _GATE_NAMES.search(leaf):
            return to("gate", "adamw", True, f"output gate by its name {leaf!r}")
        if not isinstance(owners[0][0], nn.Linear) and _EMBEDDING_NAMES.search(leaf):
            return to("embedding", "adamw", False, f"table by its name {leaf!r}")
    if len(shape) > 2:
        return to("stack", "adamw", True, f"{len(shape)} dims: several matrices in one tensor, not split")
    return to("projection", "muon", True, f"matrix of {type(owners[0][0]).__name__}")


def _is_norm(module: nn.Module) -> bool:
    known = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)
    return isinstance(module, known) or type(module).__name__.lower().endswith("norm")


def _override(routes: list[Route], rules: Mapping[str, Algorithm]) -> list[Route]:
    matched = dict.fromkeys(rules, 0)
    result = []
    for route in routes:
        found = [pattern for pattern in rules if any(fnmatch.fnmatchcase(name, pattern) for name in route.names)]
        for pattern in found:
            matched[pattern] += 1
        algorithms = {rules[pattern] for pattern in found}
        if len(algorithms) > 1:
            raise ValueError(f"rules: {route.name} is matched by {found} with different algorithms, expected one")
        if algorithms:
            algorithm = algorithms.pop()
            if algorithm not in ("muon", "adamw"):
                raise ValueError(f"rules: {found[0]!r} asks for {algorithm!r}, expected 'muon' or 'adamw'")
            if algorithm == "muon" and len(route.shape) != 2:
                raise ValueError(f"rules: {found[0]!r} asks for muon on {route.name} of shape {route.shape}, expected a matrix")
            route = replace(route, algorithm=algorithm, reason=f"rule {found[0]!r}")
        result.append(route)
    for pattern, count in matched.items():
        if count == 0:
            raise ValueError(f"rules: pattern {pattern!r} matches no trainable parameter; names are like {routes[0].name!r}")
    return result
