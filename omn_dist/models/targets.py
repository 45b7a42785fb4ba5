"""Models by name, on the meta device: Hugging Face types, ``config.json`` files, own functions."""

import contextlib
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omn_dist.settings import SettingsError, import_module, unknown_name

HF_PREFIX = "hf:"
_SMALL: Mapping[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "state_size": 8,
    "time_step_rank": 6,
    "d_kv": 16,
    "d_ff": 96,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "num_decoder_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
"""Sizes of the small model of a type; fields that its configuration lacks are left out."""
_AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageClassification",
    "AutoModelForMaskedLM",
    "AutoModel",
)


def is_model_target(target: str) -> bool:
    """Whether ``target`` names a model; if not, it is the YAML file of a run."""
    return (
        target.startswith(HF_PREFIX)
        or target.endswith(".json")
        or (Path(target) / "config.json").is_file()
        or (":" in target and not Path(target).exists())
    )


def meta_model(target: str) -> nn.Module:
    """The model that ``target`` names, on the meta device.

    Args:
        target: ``hf:<model_type>`` or ``hf:<Name>Config`` for a small model of that type, the path
            of a ``config.json`` or of its folder for that model in its full size, or
            ``module:function`` for a function without arguments that returns a module.

    Raises:
        SettingsError: ``target`` is none of these, or the model cannot be built.
    """
    if target.startswith(HF_PREFIX):
        return hf_model(_small_config(target.removeprefix(HF_PREFIX)))
    path = Path(target)
    if target.endswith(".json") or path.is_dir():
        return hf_model(_config_from_file(path / "config.json" if path.is_dir() else path))
    return _from_function(target)


def hf_config(model_type: str, sizes: Mapping[str, Any]) -> Any:
    """A Hugging Face configuration of ``model_type`` with these fields.

    Raises:
        SettingsError: transformers is not installed, the type or a field is unknown, or the
            configuration refuses the values.
    """
    transformers = _transformers()
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    if model_type not in known:
        raise SettingsError(unknown_name("Hugging Face model type", model_type, known).split(" (known:")[0])
    default = transformers.AutoConfig.for_model(model_type)
    for field in sizes:
        if not hasattr(default, field):
            raise SettingsError(unknown_name(f"field of {type(default).__name__}", field, default.to_dict()))
    with _one_line(f"configuration of {model_type}"):
        return transformers.AutoConfig.for_model(model_type, **sizes)


def hf_model(config: Any, device: str = "meta") -> nn.Module:
    """The model of a Hugging Face configuration.

    Its class is the configuration's first architecture, or else the first automatic class of
    transformers that knows the configuration.

    Raises:
        SettingsError: the model cannot be built.
    """
    transformers = _transformers()
    names = [name for name in getattr(config, "architectures", None) or () if hasattr(transformers, name)]
    with torch.device(device), _one_line(f"model of {type(config).__name__}"):
        if names:
            model: nn.Module = getattr(transformers, names[0])._from_config(config)
            return model
        # An encoder-decoder also has a class for its decoder alone.
        has_encoder = bool(getattr(config, "is_encoder_decoder", False))
        for name in sorted(_AUTO_CLASSES, key=lambda name: has_encoder and "Seq2Seq" not in name):
            automatic = getattr(transformers, name)
            if type(config) in automatic._model_mapping:
                model = automatic.from_config(config)
                return model
    raise SettingsError(
        f"model of {type(config).__name__}: found no model class for it, expected one of {', '.join(_AUTO_CLASSES)}"
    )


def _small_config(name: str) -> Any:
    transformers = _transformers()
    if name.endswith("Config"):
        if not hasattr(transformers, name):
            raise SettingsError(f"hf:{name}: found no such configuration class in transformers, expected one such as Qwen3Config")
        name = getattr(transformers, name).model_type
    default = hf_config(name, {})
    sizes = {field: size for field, size in _SMALL.items() if hasattr(default, field)}
    if "qk_rope_head_dim" in sizes and "head_dim" in sizes:
        # In latent attention head_dim is the rotary part of a head, and every head has its own key.
        sizes["head_dim"], sizes["num_key_value_heads"] = sizes["qk_rope_head_dim"], sizes["num_attention_heads"]
    # Some types require relations between sizes. Then only the number of layers is reduced: on the
    # meta device the width costs nothing.
    for chosen in (sizes, {field: size for field, size in sizes.items() if field.endswith("layers")}):
        try:
            config = hf_config(name, chosen)
            hf_model(config)
            return config
        except SettingsError:
            continue
    return default


def _config_from_file(path: Path) -> Any:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: cannot read a Hugging Face configuration: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise SettingsError(f"{path}: found no 'model_type', expected the config.json of a Hugging Face model")
    transformers = _transformers()
    hf_config(values["model_type"], {})
    with _one_line(str(path)):
        return transformers.AutoConfig.for_model(**values)


def _from_function(target: str) -> nn.Module:
    module_name, _, function_name = target.partition(":")
    module = import_module(module_name, path=target)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise SettingsError(f"{target}: cannot find the function {function_name!r}; expected module:function that returns a model")
    with torch.device("meta"):
        model = function()
    if not isinstance(model, nn.Module):
        raise SettingsError(f"{target}: returned {type(model).__name__}, expected a torch.nn.Module")
    return model


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise SettingsError("transformers is not installed, and Hugging Face models need it; pip install 'omn-dist[hf]'") from None


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn errors of transformers into one line, and silence its warnings."""
    logging = _transformers().utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(f"{what}: {' '.join(str(error).split()) or type(error).__name__}") from None
    finally:
        logging.set_verbosity(verbosity)
