"""The OMN transformer with its exact OMN-1 size, Hugging Face models, and their FSDP2 sharding."""

from omn_dist.models.huggingface import HuggingFaceConfig, HuggingFaceModel
from omn_dist.models.omn import OMN, OMNConfig
from omn_dist.models.sharding import shard_model

LanguageModel = OMN | HuggingFaceModel
"""The models that training accepts: ``model(tokens, targets)`` returns the loss."""

__all__ = ["OMN", "HuggingFaceConfig", "HuggingFaceModel", "LanguageModel", "OMNConfig", "shard_model"]
