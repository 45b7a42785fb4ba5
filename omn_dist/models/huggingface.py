"""Causal language models of transformers, built from a configuration and a seed; no download."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omn_dist.models.targets import hf_config, hf_model
from omn_dist.settings import SettingsError


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """A causal language model of transformers.

    Fields that its configuration does not know raise :class:`SettingsError`.
    """

    huggingface: str
    """Model type, such as ``llama`` or ``qwen3``."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the type's configuration, such as ``hidden_size``; others keep their defaults."""

    def __post_init__(self) -> None:
        if not isinstance(getattr(self._built, "vocab_size", None), int):
            raise SettingsError(f"model.huggingface: found {self.huggingface!r}, expected the type of a causal language model")

    @functools.cached_property
    def _built(self) -> Any:
        try:
            return hf_config(self.huggingface, self.config)
        except SettingsError as error:
            raise SettingsError(f"model.huggingface: {error}") from None

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 .. ``vocab_size`` - 1."""
        return int(self._built.vocab_size)

    def build(self, device: torch.device) -> "HuggingFaceModel":
        """The model on ``device`` (meta: without weights)."""
        return HuggingFaceModel(hf_model(self._built, str(device)))


class HuggingFaceModel(nn.Module):
    """A model of transformers with the interface of OMN: from tokens and targets to a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules that transformers never splits; FSDP2 shards each as a group of its own.

        Raises:
            SettingsError: the model names no such modules.
        """
        kinds = set(getattr(self.model, "_no_split_modules", None) or ())
        blocks = [module for module in self.model.modules() if type(module).__name__ in kinds]
        if not blocks:
            raise SettingsError(
                f"model.huggingface: {type(self.model).__name__} names no blocks to shard, expected _no_split_modules; choose "
                "another type"
            )
        return blocks

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits, or with targets the mean cross-entropy in nats, fp32.

        A target of -100 leaves its position out of the mean.
        """
        logits_BTV: Tensor = self.model(input_ids=tokens_BT, use_cache=False).logits
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def initialized(config: HuggingFaceConfig, seed: int) -> HuggingFaceModel:
    """The model on the CPU, with weights that depend only on the seed.

    transformers initialises a model as a whole, buffers included, so each rank holds the whole
    model until it is sharded.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return config.build(torch.device("cpu"))
