"""Text as tokens: where they come from, how they are stored, and in which order a run reads them."""

from omn_dist.train.data.preparation import prepare
from omn_dist.train.data.sampler import BatchSource, rank_share
from omn_dist.train.data.source import DataConfig, TextData, open_data
from omn_dist.train.data.stream import TokenStream

__all__ = ["BatchSource", "DataConfig", "TextData", "TokenStream", "open_data", "prepare", "rank_share"]
