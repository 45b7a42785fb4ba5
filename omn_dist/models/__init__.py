"""The OMN transformer, its exact OMN-1 size, models of transformers, and their FSDP2 wrapping."""

from omn_dist.models.huggingface import HuggingFaceConfig, HuggingFaceModel
from omn_dist.models.omn import OMN, OMNConfig
from omn_dist.models.sharding import shard_model

LanguageModel = OMN | HuggingFaceModel
"""What training takes: ``model(tokens, targets)`` is the loss."""

__all__ = ["OMN", "HuggingFaceConfig", "HuggingFaceModel", "LanguageModel", "OMNConfig", "shard_model"]
