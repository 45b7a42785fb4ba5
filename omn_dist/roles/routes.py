"""Roles decided by module type and structure first, by name second; each decision with its reason.

Only types, names, dims and sizes that modules carry are looked at, never values or local shapes: the answer is the same on the
meta device, before and after ``fully_shard``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from omn_dist.plan.views import View
from omn_dist.roles.declare import Found, add_view, declared_views
from omn_dist.roles.fused import LOOKS_FUSED, recognised_views, transposed_storage
from omn_dist.roles.role import Algorithm, Role, Route, plain_name
from omn_dist.roles.rules import apply_rules

_HEAD_NAMES = {"lm_head", "head", "score", "classifier", "embed_out", "unembed", "unembedding", "qa_outputs", "to_logits"}
# Blocks of a network have projections of these names too.
_HEAD_NAMES_OUTSIDE_BLOCKS = {"output", "output_layer", "proj_out"}
_POSITION_NAMES = re.compile(r"position|^wpe$|^pos_|relative_attention_bias")
_EMBEDDING_NAMES = re.compile(r"embed|^wte$|lookup|table")
_TABLE_NAMES = re.compile(r"n_?gram|lookup_table|hash_table")
_ROUTER_NAMES = {"router", "gate", "wg"}
_GATE_NAMES = re.compile(r"(?:^|_)(?:shared_expert_gate|output_gate|out_gate|attn_gate|g_proj|gate_weight|in_proj_z|z_proj)$")
_SCALAR_NAMES = re.compile(r"^(?:in_proj_(?:ba|b|a)|[ab]_proj|beta_proj|dt_proj|A_log|D|sinks)$")
_LOW_RANK_NAMES = re.compile(r"(?:^|_)(?:lora|gr|low_?rank)(?:_|$)|^[fg]_[ab]_proj$")
_RESIDUAL_QUERY_NAMES = re.compile(r"(?:^|_)res(?:idual)?_(?:proj|query)$")
_NARROW_RATIO = 64
"""From this ratio of its sides on, a projection of no known name is a narrow low-rank one."""
_KNOWN_PROJECTION = re.compile(r"(?:^|_)(?:[qkvo]|out|up|down|gate|wq|wk|wv|wo|query|key|value|dense|fc\d?|w\d)(?:_proj)?$", re.I)


@dataclass(frozen=True)
class _Parameter:
    """A trainable parameter with every place that it has in the model."""

    parameter: Tensor
    names: tuple[str, ...]
    owners: tuple[tuple[nn.Module, str], ...]
    """Modules that hold it, with the attribute."""
    declared: Found | None
    recognised: Found | None
    is_output: bool
    """Whether it is the weight of the model's output head by structure."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    def route(self, role: Role, algorithm: Algorithm, has_decay: bool, reason: str, view: View | None = None) -> Route:
        return Route(self.names, self.shape, role, algorithm, has_decay, reason, view)


def route_parameters(model: nn.Module, rules: Mapping[Any, Algorithm] | None = None) -> list[Route]:
    """The route of every trainable parameter, once, in the order of ``model.named_parameters()``.

    Args:
        model: on any device, meta included, sharded or not.
        rules: glob patterns on names, modules or module classes to algorithms, stronger than roles. Each must match, and no two
            may disagree. Muon on a convolution flattens its kernel into the columns of one matrix a group of channels.

    Raises:
        ValueError: nothing is trainable; a rule matches nothing, conflicts, or asks for Muon on a tensor that is no matrix; a
            declared view that does not fit or conflicts, or is declared on what can be no matrix.

    Not collective.
    """
    parameters = _trainable(model)
    routes = [_route(parameter) for parameter in parameters]
    if not routes:
        raise ValueError("model: no trainable parameter (all frozen, or none at all), expected at least one")
    return apply_rules(routes, [parameter.owners for parameter in parameters], model, rules or {})


def _trainable(model: nn.Module) -> list[_Parameter]:
    """Each trainable parameter in order of first appearance."""
    modules = dict(model.named_modules(remove_duplicate=False))
    declared = declared_views(model)
    recognised: dict[int, Found] = {}
    for parameter, view, reason in recognised_views(model):
        if id(parameter) not in declared:
            add_view(recognised, parameter, Found(view, reason))
    outputs = _output_heads(model)
    parameters: dict[int, Tensor] = {}
    names: dict[int, list[str]] = {}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            path, _, attribute = name.rpartition(".")
            parameters[id(parameter)] = parameter
            names.setdefault(id(parameter), []).append(plain_name(name))
            owners.setdefault(id(parameter), []).append((modules[path], attribute))
    return [
        _Parameter(
            parameter,
            tuple(dict.fromkeys(names[key])),
            tuple(owners[key]),
            declared.get(key),
            recognised.get(key),
            key in outputs,
        )
        for key, parameter in parameters.items()
    ]


def _output_heads(model: nn.Module) -> set[int]:
    """Weights of the heads that modules name themselves, as those of Hugging Face do."""
    found = set()
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        if callable(get):
            try:
                head = get()
            except (AttributeError, NotImplementedError):
                continue
            weight = getattr(head, "weight", None)
            if isinstance(weight, Tensor):
                found.add(id(weight))
    return found


def _route(parameter: _Parameter) -> Route:
    by_type = _route_by_type(parameter)
    declared = parameter.declared
    if declared is not None:
        if by_type is not None and by_type.algorithm == "adamw" and by_type.role != "convolution":
            raise ValueError(
                f"parameter {parameter.names[0]}: found a view ({declared.source}) of the {by_type.role} ({by_type.reason}), "
                "expected views of projections only; remove it"
            )
        return parameter.route(_matrix_role(parameter), "muon", True, declared.source, declared.view)
    return by_type or _route_by_name(parameter) or _route_matrix(parameter)


def _route_by_type(parameter: _Parameter) -> Route | None:
    for module, attribute in parameter.owners:
        kind = type(module).__name__
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            tied = f", tied to {parameter.names[-1]}" if len(parameter.names) > 1 else ""
            if getattr(module, "sparse", False) or isinstance(module, nn.EmbeddingBag) or _is_table(parameter):
                return parameter.route("table", "adamw", False, f"sparse look-up table of {kind}{tied}")
            return parameter.route("embedding", "adamw", False, f"weight of {kind}{tied}")
        if _is_norm(module):
            return parameter.route("norm", "adamw", False, f"parameter of {kind}")
        if attribute == "bias" or attribute.endswith("_bias"):
            return parameter.route("bias", "adamw", False, "bias")
        if isinstance(module, nn.modules.conv._ConvNd):
            depthwise = module.groups > 1 and module.groups == module.in_channels
            what = "depthwise" if depthwise else f"{module.kernel_size} with {module.in_channels} channels in"
            return parameter.route("convolution", "adamw", True, f"kernel of {kind}, {what}")
        if attribute == "weight" and kind.endswith("Router"):
            return parameter.route("router", "adamw", True, f"weight of {kind}")
    if parameter.is_output:
        return parameter.route("head", "adamw", False, "output head of the model")
    return None


def _route_by_name(parameter: _Parameter) -> Route | None:
    if len(parameter.shape) < 2:
        leaf = _leaf(parameter.names[0])
        if _SCALAR_NAMES.search(leaf):
            return parameter.route("scalar", "adamw", False, f"per-head or per-channel scalars by its name {leaf!r}")
        return parameter.route("vector", "adamw", False, "one dim at most: no matrix geometry")
    is_linear = isinstance(parameter.owners[0][0], nn.Linear)
    for name in parameter.names:
        parts = name.split(".")
        leaf = _leaf(name)
        in_block = any(part.isdigit() for part in parts)
        if leaf in _HEAD_NAMES or (leaf in _HEAD_NAMES_OUTSIDE_BLOCKS and not in_block):
            return parameter.route("head", "adamw", False, f"output head by its name {leaf!r}")
        if leaf in _ROUTER_NAMES:
            return parameter.route("router", "adamw", True, f"router by its name {leaf!r}")
        if _GATE_NAMES.search(leaf):
            return parameter.route("gate", "adamw", True, f"output gate by its name {leaf!r}")
        if _SCALAR_NAMES.search(leaf):
            is_weight = parts[-1] == "weight"
            return parameter.route("scalar", "adamw", is_weight, f"per-head or per-channel scalars by its name {leaf!r}")
        low_rank = next((part for part in parts if _LOW_RANK_NAMES.search(part)), None)
        if low_rank is not None:
            return parameter.route("low_rank", "adamw", True, f"narrow low-rank factor by its name {low_rank!r}")
        if not is_linear and _POSITION_NAMES.search(leaf):
            return parameter.route("position", "adamw", False, f"positional table by its name {leaf!r}")
        if not is_linear and _EMBEDDING_NAMES.search(leaf):
            role: Role = "table" if _is_table(parameter) else "embedding"
            return parameter.route(role, "adamw", False, f"table by its name {leaf!r}")
        if is_linear and parameter.shape[0] == 1 and _RESIDUAL_QUERY_NAMES.search(leaf):
            return parameter.route("residual_query", "adamw", False, f"learned residual query by its name {leaf!r}")
    if min(parameter.shape[-2:]) <= 1 or max(parameter.shape) == parameter.parameter.numel():
        return parameter.route("vector", "adamw", False, f"shape {parameter.shape}, a side of one: no matrix geometry")
    return None


def _route_matrix(parameter: _Parameter) -> Route:
    shape, (module, _) = parameter.shape, parameter.owners[0]
    kind, role = type(module).__name__, _matrix_role(parameter)
    if parameter.recognised is not None:
        return parameter.route(role, "muon", True, parameter.recognised.source, parameter.recognised.view)
    leaf = _leaf(parameter.names[0])
    if LOOKS_FUSED.search(leaf):
        reason = f"several matrices by its name {leaf!r}, in an order that nothing says: declare a view"
        return parameter.route("fused", "adamw", True, reason)
    if len(shape) > 2:
        return parameter.route("stack", "adamw", True, f"{len(shape)} dims, and nothing says what they are: declare a view")
    if max(shape) >= _NARROW_RATIO * min(shape) and not _KNOWN_PROJECTION.search(leaf):
        return parameter.route("low_rank", "adamw", True, f"narrow, {shape[0]} x {shape[1]}")
    view = transposed_storage(module, parameter.parameter)
    if view is not None:
        return parameter.route(role, "muon", True, f"matrix of {kind}, stored transposed", view)
    return parameter.route(role, "muon", True, f"matrix of {kind}")


def _matrix_role(parameter: _Parameter) -> Role:
    parts = parameter.names[0].split(".")
    in_expert = any("expert" in part for part in parts) or "expert" in type(parameter.owners[0][0]).__name__.lower()
    return "expert" if in_expert else "projection"


def _leaf(name: str) -> str:
    """The module's own name: the last part of the path for module weights, the attribute for bare parameters."""
    parts = name.split(".")
    return parts[-2] if parts[-1] == "weight" and len(parts) > 1 else parts[-1]


def _is_table(parameter: _Parameter) -> bool:
    return any(_TABLE_NAMES.search(part) for name in parameter.names for part in name.split("."))


def _is_norm(module: nn.Module) -> bool:
    known = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)
    return isinstance(module, known) or re.search(r"norm(?:gated|ed)?$", type(module).__name__.lower()) is not None
