"""The role of each parameter, by module type and structure first and by name second.

The decision uses module types, names, global shapes and sizes that modules store as attributes. It
never uses values or local shapes, so it is the same on the meta device and after ``fully_shard``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from omn_dist.plan.geometry.views import View
from omn_dist.roles.algorithms import FOR_MATRICES, FOR_OTHERS
from omn_dist.roles.declare import FoundView, add_view, declared_views
from omn_dist.roles.fused import LOOKS_FUSED, recognised_views, transposed_storage
from omn_dist.roles.role import Role, Route, plain_name
from omn_dist.roles.rules import apply_rules

_HEAD_NAMES = {"lm_head", "head", "score", "classifier", "embed_out", "unembed", "unembedding", "qa_outputs", "to_logits"}
# Heads only outside of blocks: projections inside a block have these names too.
_HEAD_NAMES_OUTSIDE_BLOCKS = {"output", "output_layer", "proj_out"}
_POSITION_NAMES = re.compile(r"position|^wpe$|^pos_|relative_attention_bias")
_EMBEDDING_NAMES = re.compile(r"embed|^wte$|lookup|table")
_TABLE_NAMES = re.compile(r"n_?gram|lookup_table|hash_table")
_ROUTER_NAMES = {"router", "gate", "wg"}
_GATE_NAMES = re.compile(r"(?:^|_)(?:shared_expert_gate|output_gate|out_gate|attn_gate|g_proj|gate_weight|in_proj_z|z_proj)$")
_SCALAR_NAMES = re.compile(r"^(?:in_proj_(?:ba|b|a)|[ab]_proj|beta_proj|dt_proj|A_log|D|sinks)$")
_LOW_RANK_NAMES = re.compile(r"(?:^|_)(?:lora|gr|low_?rank)(?:_|$)|^[fg]_[ab]_proj$")
_RESIDUAL_QUERY_NAMES = re.compile(r"(?:^|_)res(?:idual)?_(?:proj|query)$")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_NARROW_RATIO = 64
"""A matrix with no known name counts as low-rank when its sides differ by this factor or more."""
_KNOWN_PROJECTION = re.compile(r"(?:^|_)(?:[qkvo]|out|up|down|gate|wq|wk|wv|wo|query|key|value|dense|fc\d?|w\d)(?:_proj)?$", re.I)


@dataclass(frozen=True)
class _Parameter:
    """A trainable parameter, with all its names and all modules that own it."""

    parameter: Tensor
    names: tuple[str, ...]
    parents: tuple[tuple[nn.Module, str], ...]
    """The modules that own it, each with the attribute's name."""
    declared: FoundView | None
    recognised: FoundView | None
    is_output: bool
    """Whether the model itself names it as the weight of its output head."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    def matrix(self, role: Role, reason: str, view: View | None = None) -> Route:
        """The route of a parameter that holds matrices; these always decay."""
        return Route(self.names, self.shape, role, FOR_MATRICES, True, reason, view)

    def other(self, role: Role, has_decay: bool, reason: str) -> Route:
        """The route of a parameter that holds no matrix."""
        return Route(self.names, self.shape, role, FOR_OTHERS, has_decay, reason)


def route_parameters(model: nn.Module, rules: Mapping[Any, str | Mapping[str, Any]] | None = None) -> list[Route]:
    """The routes of all trainable parameters, in the order of ``model.named_parameters()``.

    Args:
        model: on any device, meta included, sharded or not.
        rules: as for ``build_parameter_groups``. Each pattern, module and class must match a
            parameter. Two of them, or two roles, must not give one parameter different values of
            one field. A convolution that a rule gives to an algorithm for matrices becomes one
            matrix a channel group, its kernel flattened into columns.

    Raises:
        ValueError: nothing is trainable; a rule names an unknown algorithm or field, matches
            nothing, contradicts another, or asks for a matrix where there is none; a declared view
            does not fit, contradicts another, or belongs to a parameter that cannot hold matrices.

    Not collective.
    """
    parameters = _trainable(model)
    routes = [_route(parameter) for parameter in parameters]
    if not routes:
        raise ValueError("model: no trainable parameter (all frozen, or none at all), expected at least one")
    return apply_rules(routes, [parameter.parents for parameter in parameters], model, {} if rules is None else rules)


def _trainable(model: nn.Module) -> list[_Parameter]:
    """The trainable parameters in order of first appearance."""
    modules = dict(model.named_modules(remove_duplicate=False))
    declared = declared_views(model)
    recognised: dict[int, FoundView] = {}
    for parameter, view, reason in recognised_views(model):
        if id(parameter) not in declared:
            add_view(recognised, parameter, FoundView(view, reason))
    outputs = _output_heads(model)
    parameters: dict[int, Tensor] = {}
    names: dict[int, list[str]] = {}
    parents: dict[int, list[tuple[nn.Module, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            path, _, attribute = name.rpartition(".")
            parameters[id(parameter)] = parameter
            names.setdefault(id(parameter), []).append(plain_name(name))
            parents.setdefault(id(parameter), []).append((modules[path], attribute))
    return [
        _Parameter(
            parameter,
            tuple(dict.fromkeys(names[key])),
            tuple(parents[key]),
            declared.get(key),
            recognised.get(key),
            key in outputs,
        )
        for key, parameter in parameters.items()
    ]


def _output_heads(model: nn.Module) -> set[int]:
    """The ``id`` of each weight that ``get_output_embeddings`` of a module returns."""
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
        if by_type is not None and by_type.role != "convolution":
            raise ValueError(
                f"parameter {parameter.names[0]}: found a view ({declared.source}) of the {by_type.role} ({by_type.reason}), "
                "expected views of projections only; remove it"
            )
        return parameter.matrix(_matrix_role(parameter), declared.source, declared.view)
    return by_type or _route_by_name(parameter) or _route_by_shape(parameter)


def _route_by_type(parameter: _Parameter) -> Route | None:
    for module, attribute in parameter.parents:
        kind = type(module).__name__
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            tied = f", tied to {parameter.names[-1]}" if len(parameter.names) > 1 else ""
            if getattr(module, "sparse", False) or isinstance(module, nn.EmbeddingBag) or _is_table(parameter):
                return parameter.other("table", False, f"sparse look-up table of {kind}{tied}")
            return parameter.other("embedding", False, f"weight of {kind}{tied}")
        if _is_norm(module):
            return parameter.other("norm", False, f"parameter of {kind}")
        if attribute == "bias" or attribute.endswith("_bias"):
            return parameter.other("bias", False, "bias")
        if isinstance(module, _CONVOLUTIONS):
            depthwise = module.groups > 1 and module.groups == module.in_channels
            what = "depthwise" if depthwise else f"{module.kernel_size} with {module.in_channels} channels in"
            return parameter.other("convolution", True, f"kernel of {kind}, {what}")
        if attribute == "weight" and kind.endswith("Router"):
            return parameter.other("router", True, f"weight of {kind}")
    if parameter.is_output:
        return parameter.other("head", False, "output head of the model")
    return None


def _route_by_name(parameter: _Parameter) -> Route | None:
    if len(parameter.shape) < 2:
        leaf = _leaf(parameter.names[0])
        if _SCALAR_NAMES.search(leaf):
            return parameter.other("scalar", False, f"per-head or per-channel scalars by its name {leaf!r}")
        return parameter.other("vector", False, "at most one dim, so no matrix")
    is_linear = isinstance(parameter.parents[0][0], nn.Linear)
    for name in parameter.names:
        parts = name.split(".")
        leaf = _leaf(name)
        in_block = any(part.isdigit() for part in parts)
        if leaf in _HEAD_NAMES or (leaf in _HEAD_NAMES_OUTSIDE_BLOCKS and not in_block):
            return parameter.other("head", False, f"output head by its name {leaf!r}")
        if leaf in _ROUTER_NAMES:
            return parameter.other("router", True, f"router by its name {leaf!r}")
        if _GATE_NAMES.search(leaf):
            return parameter.other("gate", True, f"output gate by its name {leaf!r}")
        if _SCALAR_NAMES.search(leaf):
            is_weight = parts[-1] == "weight"
            return parameter.other("scalar", is_weight, f"per-head or per-channel scalars by its name {leaf!r}")
        low_rank = next((part for part in parts if _LOW_RANK_NAMES.search(part)), None)
        if low_rank is not None:
            return parameter.other("low_rank", True, f"narrow low-rank factor by its name {low_rank!r}")
        if not is_linear and _POSITION_NAMES.search(leaf):
            return parameter.other("position", False, f"positional table by its name {leaf!r}")
        if not is_linear and _EMBEDDING_NAMES.search(leaf):
            role: Role = "table" if _is_table(parameter) else "embedding"
            return parameter.other(role, False, f"table by its name {leaf!r}")
        if is_linear and parameter.shape[0] == 1 and _RESIDUAL_QUERY_NAMES.search(leaf):
            return parameter.other("residual_query", False, f"learned residual query by its name {leaf!r}")
    if min(parameter.shape[-2:]) <= 1 or max(parameter.shape) == parameter.parameter.numel():
        return parameter.other("vector", False, f"shape {parameter.shape} with a side of one, so no matrix")
    return None


def _route_by_shape(parameter: _Parameter) -> Route:
    shape, (module, _) = parameter.shape, parameter.parents[0]
    kind, role = type(module).__name__, _matrix_role(parameter)
    if parameter.recognised is not None:
        return parameter.matrix(role, parameter.recognised.source, parameter.recognised.view)
    leaf = _leaf(parameter.names[0])
    if LOOKS_FUSED.search(leaf):
        reason = f"several matrices by its name {leaf!r}, in an unknown order: declare a view"
        return parameter.other("fused", True, reason)
    if len(shape) > 2:
        return parameter.other("stack", True, f"{len(shape)} dims of unknown meaning: declare a view")
    if max(shape) >= _NARROW_RATIO * min(shape) and not _KNOWN_PROJECTION.search(leaf):
        return parameter.other("low_rank", True, f"narrow, {shape[0]} x {shape[1]}")
    view = transposed_storage(module, parameter.parameter)
    if view is not None:
        return parameter.matrix(role, f"matrix of {kind}, stored transposed", view)
    return parameter.matrix(role, f"matrix of {kind}")


def _matrix_role(parameter: _Parameter) -> Role:
    parts = parameter.names[0].split(".")
    in_expert = any("expert" in part for part in parts) or "expert" in type(parameter.parents[0][0]).__name__.lower()
    return "expert" if in_expert else "projection"


def _leaf(name: str) -> str:
    """The name of the module for a module's weight, that of the attribute for a bare parameter."""
    parts = name.split(".")
    return parts[-2] if parts[-1] == "weight" and len(parts) > 1 else parts[-1]


def _is_table(parameter: _Parameter) -> bool:
    return any(_TABLE_NAMES.search(part) for name in parameter.names for part in name.split("."))


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or re.search(r"norm(?:gated|ed)?$", type(module).__name__.lower()) is not None
