"""Text as tokens: sources, shards on disk, and the order in which a run reads them."""

from omn_dist.train.data.preparation import prepare_text
from omn_dist.train.data.sampler import BatchSource, rank_share
from omn_dist.train.data.source import DataConfig, TextData, open_data
from omn_dist.train.data.stream import TokenStream
from omn_dist.train.data.tokenizer import open_tokenizer

__all__ = ["BatchSource", "DataConfig", "TextData", "TokenStream", "open_data", "open_tokenizer", "prepare_text", "rank_share"]
