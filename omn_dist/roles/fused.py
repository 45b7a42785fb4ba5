"""Views of the fused projections of known modules: the order of their rows and the sizes.

A shape does not tell the layout: a ``(3 H D, C)`` weight holds ``[q | k | v]`` in one model and
``[q k v]`` head by head in another. So each recogniser looks for a module type or for attributes
with the sizes. A projection that looks fused but is not known here is reported, never guessed.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from omn_dist.plan.geometry.views import View

Recogniser = Callable[[nn.Module], dict[str, View]]
"""From a module to the views of the parameters below it, by path; empty if it does not know it.

The first sentence of its docstring becomes the reason of the route.
"""

LOOKS_FUSED = re.compile(
    r"^(?:w?qkv(?:_proj)?|query_key_value|c_attn|qkv_?weight|in_proj_weight|in_proj_qkvz?|w13|gate_up(?:_proj)?)$", re.I
)
"""Names of parameters, or of the modules that own them, that hold several matrices."""

_CONCATENATED_QKV = re.compile(r"^(?:Phi3|Phi4Multimodal|Mpt|Dbrx|ModernBert)\w*Attention$|^\w*VisionAttention$")
_QKV_BY_HEAD = re.compile(r"^(?:GPTNeoX(?:Japanese)?|Bloom|Persimmon|Falcon)(?:Flash|Sdpa)?Attention\w*$")
_GATED_QUERY = re.compile(r"^Qwen(?:3Next|3_5)\w*Attention$")
_QKV_NAMES = ("qkv_proj", "qkv", "Wqkv", "query_key_value")


def recognised_views(model: nn.Module) -> Iterator[tuple[Tensor, View, str]]:
    """Each fused projection of known layout: the parameter, its view and the reason."""
    for module in model.modules():
        for recognise in RECOGNISERS:
            for path, view in recognise(module).items():
                target: Any = module
                for part in path.split("."):
                    target = getattr(target, part)
                # A recogniser with a wrong shape is an error, not a skipped view.
                view.check(f"{path} of {type(module).__name__}", target.shape)
                yield target, view, f"{(recognise.__doc__ or '').split('.')[0].lower()} of {type(module).__name__}"


def _weight(module: nn.Module, name: str) -> Tensor | None:
    """The weight of a child module if it has two dims, else ``None``."""
    child = getattr(module, name, None)
    weight = getattr(child, "weight", None) if isinstance(child, nn.Module) else None
    return weight if isinstance(weight, nn.Parameter) and weight.ndim == 2 else None


def _sizes(module: nn.Module, *names: str) -> tuple[int, ...] | None:
    """Positive integer attributes of a module or of its ``config``; ``None`` if one is missing."""
    config = getattr(module, "config", None)
    found = (getattr(module, name, getattr(config, name, None)) for name in names)
    sizes = tuple(size for size in found if isinstance(size, int) and size > 0)
    return sizes if len(sizes) == len(names) else None


def _first(module: nn.Module, *names: str) -> int | None:
    return next((sizes[0] for name in names if (sizes := _sizes(module, name))), None)


def _gate_and_up(module: nn.Module) -> dict[str, View]:
    """Fused gate and up projection."""
    weight = _weight(module, "gate_up_proj")
    if weight is None or not isinstance(module.gate_up_proj, nn.Linear) or weight.shape[0] % 2:
        return {}
    rows, columns = weight.shape
    return {"gate_up_proj.weight": View(shape=(2, rows // 2, columns))}


def _heads_of_qkv(module: nn.Module) -> dict[str, View]:
    """Heads of fused queries, keys and values."""
    sizes = _sizes(module, "num_heads", "d_head", "d_model")
    if sizes is None or _weight(module, "QKV") is None:
        return {}
    return {"QKV.weight": View(shape=(3, *sizes))}


def _qkv(module: nn.Module) -> dict[str, View]:
    """Fused queries, keys and values."""
    if isinstance(module, nn.MultiheadAttention):
        packed = dict(module.named_parameters(recurse=False)).get("in_proj_weight")
        return {} if packed is None else {"in_proj_weight": _concatenated(packed, 3, 1, 1)}
    kind = type(module).__name__
    concatenated = _CONCATENATED_QKV.match(kind) is not None
    if not (concatenated or _QKV_BY_HEAD.match(kind)):
        return {}
    name, weight = next(((name, found) for name in _QKV_NAMES if (found := _weight(module, name)) is not None), ("", None))
    if weight is None:
        return {}
    num_heads = _first(module, "num_heads", "num_attention_heads", "n_heads")
    if num_heads is None:
        return {}
    num_kv_heads = _first(module, "num_key_value_heads") or num_heads
    if kind.startswith("Falcon"):
        num_kv_heads = _first(module, "num_kv_heads") or num_heads
        # A single key and value head follows all queries; several each follow their group.
        concatenated = num_kv_heads == 1
    num_parts = num_heads + 2 * num_kv_heads
    if weight.shape[0] % num_parts:
        return {}
    if concatenated:
        return {f"{name}.weight": _concatenated(weight, num_parts, num_heads, num_kv_heads)}
    head_dim = weight.shape[0] // num_parts
    group = num_heads // num_kv_heads
    return {
        f"{name}.weight": View(
            shape=(num_kv_heads, (group + 2) * head_dim, weight.shape[1]),
            split_sizes=(group * head_dim, head_dim, head_dim),
            split_names=("q", "k", "v"),
            joined_axes=(0,),
        )
    }


def _concatenated(weight: Tensor, num_parts: int, num_heads: int, num_kv_heads: int) -> View:
    rows, columns = weight.shape
    head_dim = rows // num_parts
    sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
    return View(shape=(rows, columns), split_sizes=sizes, split_names=("q", "k", "v"))


def transposed_storage(module: nn.Module, parameter: Tensor) -> View | None:
    """The view of a weight that its module stores as inputs x outputs, else ``None``."""
    if type(module).__name__ != "Conv1D" or not isinstance(getattr(module, "nf", None), int) or parameter.ndim != 2:
        return None
    inputs, outputs = parameter.shape
    return View(shape=(outputs, inputs), transposed=True)


def _transposed_qkv(module: nn.Module) -> dict[str, View]:
    """Fused queries, keys and values, stored transposed."""
    weight = _weight(module, "c_attn")
    if weight is None or type(module.c_attn).__name__ != "Conv1D":
        return {}
    inputs, outputs = weight.shape
    # In cross attention queries have a weight of their own, and only keys and values are fused.
    names = ("q", "k", "v") if _weight(module, "q_attn") is None else ("k", "v")
    if outputs % len(names):
        return {}
    sizes = (outputs // len(names),) * len(names)
    return {"c_attn.weight": View(shape=(outputs, inputs), split_sizes=sizes, split_names=names, transposed=True)}


def _gated_query(module: nn.Module) -> dict[str, View]:
    """Queries with an output gate in each head."""
    query, output, head_dim = _weight(module, "q_proj"), _weight(module, "o_proj"), _first(module, "head_dim")
    if not _GATED_QUERY.match(type(module).__name__) or query is None or output is None or head_dim is None:
        return {}
    if query.shape[0] != 2 * output.shape[1]:
        return {}
    rows, columns = query.shape
    return {
        "q_proj.weight": View(
            shape=(rows // (2 * head_dim), 2 * head_dim, columns),
            split_sizes=(head_dim, head_dim),
            split_names=("q", "gate"),
            split_algorithms=("muon", "adamw"),
            joined_axes=(0,),
        )
    }


def _latent_attention(module: nn.Module) -> dict[str, View]:
    """Latent attention, each head."""
    views: dict[str, View] = {}
    for query, key_value, names in (
        ("q_b_proj", "kv_b_proj", ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
        ("W_UQ", "W_UKV", ("num_heads", "d_head", "d_shared", "dv_head")),
    ):
        sizes, up = _sizes(module, *names), _weight(module, key_value)
        if sizes is None or up is None:
            continue
        num_heads, content, shared, value = sizes
        rank = up.shape[1]
        views[f"{key_value}.weight"] = View(
            shape=(num_heads, content + value, rank), split_sizes=(content, value), split_names=("k", "v")
        )
        if (weight := _weight(module, query)) is not None:
            views[f"{query}.weight"] = View(shape=(num_heads, content + shared, weight.shape[1]))
        # The latent and the shared rotary key are two operators.
        if (down := _weight(module, "kv_a_proj_with_mqa")) is not None and down.shape[0] == rank + shared:
            views["kv_a_proj_with_mqa.weight"] = View(
                shape=(rank + shared, down.shape[1]), split_sizes=(rank, shared), split_names=("latent", "shared_key")
            )
    return views


def _delta_net(module: nn.Module) -> dict[str, View]:
    """Linear attention with gates."""
    sizes = _sizes(module, "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    if sizes is None:
        return {}
    num_k_heads, num_v_heads, key_dim, value_dim = sizes
    fused = _weight(module, "in_proj_qkvz")
    if fused is not None:
        values = num_v_heads // num_k_heads * value_dim
        return {
            "in_proj_qkvz.weight": View(
                shape=(num_k_heads, 2 * key_dim + 2 * values, fused.shape[1]),
                split_sizes=(key_dim, key_dim, values, values),
                split_names=("q", "k", "v", "gate"),
                split_algorithms=("muon", "muon", "muon", "adamw"),
                joined_axes=(0,),
            )
        }
    fused = _weight(module, "in_proj_qkv")
    if fused is not None:
        keys, values = num_k_heads * key_dim, num_v_heads * value_dim
        return {
            "in_proj_qkv.weight": View(
                shape=(2 * keys + values, fused.shape[1]), split_sizes=(keys, keys, values), split_names=("q", "k", "v")
            )
        }
    return {}


def _mamba(module: nn.Module) -> dict[str, View]:
    """State-space input projections with a gate."""
    views: dict[str, View] = {}
    projection, selective = _weight(module, "in_proj"), _weight(module, "x_proj")
    if projection is None:
        return views
    rows, columns = projection.shape
    first = _sizes(module, "intermediate_size", "time_step_rank", "ssm_state_size")
    if first is not None and rows == 2 * first[0] and selective is not None:
        inner, rank, state = first
        views["in_proj.weight"] = View(
            shape=(rows, columns), split_sizes=(inner, inner), split_names=("x", "gate"), split_algorithms=("muon", "adamw")
        )
        if selective.shape[0] == rank + 2 * state:
            views["x_proj.weight"] = View(
                shape=(rank + 2 * state, inner),
                split_sizes=(rank, state, state),
                split_names=("dt", "B", "C"),
                split_algorithms=("adamw", "muon", "muon"),
            )
    second = _sizes(module, "intermediate_size", "n_groups", "ssm_state_size", "num_heads")
    if second is not None and rows == 2 * second[0] + 2 * second[1] * second[2] + second[3]:
        inner, num_groups, state, num_heads = second
        views["in_proj.weight"] = View(
            shape=(rows, columns),
            split_sizes=(inner, inner, num_groups * state, num_groups * state, num_heads),
            split_names=("gate", "x", "B", "C", "dt"),
            split_algorithms=("adamw", "muon", "muon", "muon", "adamw"),
        )
    return views


def _experts(module: nn.Module) -> dict[str, View]:
    """Stack of experts."""
    stacks: dict[str, Tensor] = {
        name: parameter for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3
    }
    if not stacks or "expert" not in type(module).__name__.lower():
        return {}
    transposed = _stores_inputs_first(module, stacks)
    if transposed is None:
        return {}
    views = {}
    for name, parameter in stacks.items():
        num_experts, rows, columns = parameter.shape
        if transposed:
            rows, columns = columns, rows
        if name in ("gate_up_proj", "w13") and rows % 2 == 0:
            if getattr(module, "is_concatenated", True):
                views[name] = View(shape=(num_experts, 2, rows // 2, columns), transposed=transposed)
            else:
                views[name] = View(
                    shape=(num_experts, rows // 2, 2, columns),
                    split_sizes=(1, 1),
                    split_names=("gate", "up"),
                    joined_axes=(1,),
                    transposed=transposed,
                )
        else:
            views[name] = View(shape=(num_experts, rows, columns), transposed=transposed)
    return views


def _stores_inputs_first(module: nn.Module, stacks: dict[str, Tensor]) -> bool | None:
    """Whether experts are stored as (experts, inputs, outputs); ``None`` if that is unknown."""
    sizes = _sizes(module, "hidden_size") or _sizes(module, "hidden_dim") or _sizes(module, "dim")
    for name in ("gate_up_proj", "w13", "gate_proj", "up_proj", "w1"):
        if sizes is not None and name in stacks:
            _, rows, columns = stacks[name].shape
            if (rows == sizes[0]) != (columns == sizes[0]):
                return bool(rows == sizes[0])
    declared = getattr(module, "is_transposed", None)
    if isinstance(declared, bool):
        return declared
    # torchtitan's class: x @ w.transpose(-2, -1).
    return False if type(module).__name__ == "GroupedExperts" and {"w1", "w2", "w3"} <= set(stacks) else None


RECOGNISERS: tuple[Recogniser, ...] = (
    _gate_and_up,
    _heads_of_qkv,
    _qkv,
    _transposed_qkv,
    _gated_query,
    _latent_attention,
    _delta_net,
    _mamba,
    _experts,
)
