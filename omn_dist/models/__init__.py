"""The OMN transformer, its exact OMN-1 size, and its FSDP2 wrapping."""

from omn_dist.models.omn import OMN, OMNConfig
from omn_dist.models.sharding import shard_model

__all__ = ["OMN", "OMNConfig", "shard_model"]
