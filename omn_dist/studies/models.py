"""Models as lists of shapes: known models, Hugging Face ``config.json`` files, and plain lists."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omn_dist.settings import SettingsError, unknown_name

Shape = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """The matrices of a model by name, and the number of all other elements."""

    name: str
    matrices: Mapping[str, Shape]
    """(outputs, inputs) of every matrix."""
    num_other_elements: int
    """Elements that are in no matrix: embeddings, head, norms, routers."""
    source: str

    @property
    def num_elements(self) -> int:
        """Elements of all parameters; a tied weight counts once."""
        return sum(rows * columns for rows, columns in self.matrices.values()) + self.num_other_elements

    def row_parallel(self, name: str) -> bool:
        """Whether tensor parallelism cuts the inputs of this matrix instead of its outputs."""
        return name.endswith(("o_proj.weight", "down_proj.weight"))


_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
_LLAMA3 = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}


def _hub(repository: str) -> str:
    return f"huggingface.co/{repository}, config.json"


# The fields of the models' own config.json.
MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "omn1": {
            "model_type": "omn",
            "hidden_size": 2048,
            "intermediate_size": 5504,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
            "source": "OMN-1, configs/omn1_193b.yaml",
        },
        "qwen3-1.7b": _QWEN3
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
            "source": _hub("Qwen/Qwen3-1.7B"),
        },
        "qwen3-8b": _QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
            "source": _hub("Qwen/Qwen3-8B"),
        },
        "qwen3-32b": _QWEN3
        | {
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "tie_word_embeddings": False,
            "source": _hub("Qwen/Qwen3-32B"),
        },
        "llama3-8b": _LLAMA3
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "source": _hub("meta-llama/Meta-Llama-3-8B"),
        },
        "llama3-70b": _LLAMA3
        | {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "source": _hub("meta-llama/Meta-Llama-3-70B"),
        },
        "qwen3-30b-a3b": _QWEN3
        | {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "tie_word_embeddings": False,
            "source": _hub("Qwen/Qwen3-30B-A3B"),
        },
        "deepseek-v3": {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "vocab_size": 129280,
            "tie_word_embeddings": False,
            "source": f"{_hub('deepseek-ai/DeepSeek-V3')}, without the multi-token prediction layer",
        },
    }
)


def load_model(text: str) -> ModelShapes:
    """A model by name, from a Hugging Face ``config.json``, or from a JSON list of shapes.

    A list is ``[[rows, columns], ...]`` or ``{"name": [rows, columns], ...}``.

    Raises:
        SettingsError: the name is unknown (the message suggests the nearest), the file cannot be
            read, or fields are missing.
    """
    if text in MODELS:
        return shapes_of(text, MODELS[text])
    path = Path(text)
    if path.suffix != ".json":
        raise SettingsError(f"{unknown_name('model', text, MODELS)}; or the path of a .json file")
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}, expected a JSON file of a model") from None
    except ValueError as error:
        raise SettingsError(f"{path}: no JSON ({error}), expected a config.json or a list of shapes") from None
    if isinstance(content, dict) and "hidden_size" in content:
        return shapes_of(path.parent.name or path.stem, {"source": str(path)} | content)
    named = content if isinstance(content, dict) else {}
    if isinstance(content, list):
        named = {f"matrix.{index}": shape for index, shape in enumerate(content)}
    for name, shape in named.items():
        if not (isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)):
            raise SettingsError(f"{path}: found {shape!r} for {name}, expected [rows, columns] of positive integers")
    if not named:
        raise SettingsError(f"{path}: found no matrix, expected a config.json with hidden_size, or a list of [rows, columns]")
    shapes = {name: (shape[0], shape[1]) for name, shape in named.items()}
    return ModelShapes(name=path.stem, matrices=shapes, num_other_elements=0, source=str(path))


def shapes_of(name: str, config: Mapping[str, Any]) -> ModelShapes:
    """The shapes of a decoder from the fields of its ``config.json``.

    It has gated feed-forward and grouped-query or latent attention. Each expert has matrices of its
    own, sharded like any other.

    Raises:
        SettingsError: a field is missing, or the model is of another kind.
    """
    kind = config.get("model_type")
    known = ("omn", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
    if kind not in known:
        raise SettingsError(f"{name}: {unknown_name('model_type', str(kind), known)}; or give a JSON list of shapes")

    def size(field: str, default: int | None = None) -> int:
        value = config.get(field, default)
        if not isinstance(value, int) or value < 0:
            raise SettingsError(f"{name}: found {value!r} for {field}, expected a number")
        return value

    hidden, num_layers = size("hidden_size"), size("num_hidden_layers")
    num_experts = size("num_experts", 0) or size("n_routed_experts", 0)
    matrices: dict[str, Shape] = {}
    vocabulary = size("vocab_size") * hidden
    others = vocabulary * (1 if config.get("tie_word_embeddings", False) else 2) + hidden
    for layer in range(num_layers):
        prefix = f"layers.{layer}"
        attention, num_norms = _attention(kind, hidden, size)
        # OMN has one norm a block, others one before attention and one before the feed-forward.
        others += num_norms + (hidden if kind == "omn" else 2 * hidden)
        of_layer = {f"{prefix}.self_attn.{part}.weight": shape for part, shape in attention.items()}
        if num_experts and layer >= size("first_k_dense_replace", 0):
            inner = size("moe_intermediate_size")
            # The router, and in DeepSeek its bias for load balancing.
            others += num_experts * (hidden + (1 if kind == "deepseek_v3" else 0))
            for expert in range(num_experts):
                of_layer |= _feed_forward(f"{prefix}.mlp.experts.{expert}", hidden, inner)
            if shared := size("n_shared_experts", 0):
                of_layer |= _feed_forward(f"{prefix}.mlp.shared_experts", hidden, inner * shared)
        else:
            of_layer |= _feed_forward(f"{prefix}.mlp", hidden, size("intermediate_size"))
        matrices |= of_layer
    return ModelShapes(name=name, matrices=matrices, num_other_elements=others, source=str(config.get("source", "")))


def _attention(kind: str, hidden: int, size: Any) -> tuple[dict[str, Shape], int]:
    """The matrices of one attention, and the number of elements of its norms and biases."""
    heads = size("num_attention_heads")
    if kind == "deepseek_v3":
        query, latent, nope, rope = (
            size(field) for field in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        )
        value = size("v_head_dim")
        return {
            "q_a_proj": (query, hidden),
            "q_b_proj": (heads * (nope + rope), query),
            "kv_a_proj_with_mqa": (latent + rope, hidden),
            "kv_b_proj": (heads * (nope + value), latent),
            "o_proj": (hidden, heads * value),
        }, query + latent
    groups = size("num_key_value_heads", heads)
    width = size("head_dim", hidden // heads)
    norms = {"qwen2": (heads + 2 * groups) * width}.get(kind, 2 * width if kind in ("omn", "qwen3", "qwen3_moe") else 0)
    return {
        "q_proj": (heads * width, hidden),
        "k_proj": (groups * width, hidden),
        "v_proj": (groups * width, hidden),
        "o_proj": (hidden, heads * width),
    }, norms


def _feed_forward(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }
