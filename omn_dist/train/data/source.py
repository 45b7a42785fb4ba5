"""The data of a run: settings, and the token streams that they name."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Literal

from omn_dist.settings import SettingsError
from omn_dist.train.data.corpus import stdlib_streams
from omn_dist.train.data.shards import META_NAME, open_shards
from omn_dist.train.data.stream import TokenStream


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from, and how long a sample is."""

    source: Literal["stdlib", "shards"] = "stdlib"
    """``stdlib``: source files of the Python standard library, as bytes; ``shards``: a folder that
    ``omn-dist data prepare`` has written."""
    path: str | None = None
    """Folder of the shards; only with ``source: shards``."""
    sequence_length: int
    """Tokens of a sample."""
    seed: int = 0
    """Seed of the order of samples. The choice of text for validation does not depend on it."""

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise SettingsError(f"data.sequence_length: found {self.sequence_length}, expected at least 1")
        if self.seed < 0:
            raise SettingsError(f"data.seed: found {self.seed}, expected 0 or more")
        if self.source == "shards" and self.path is None:
            raise SettingsError("data.path: missing, expected the folder of the shards; write one with `omn-dist data prepare`")
        if self.source == "stdlib" and self.path is not None:
            raise SettingsError(f"data.path: found {self.path!r} with source 'stdlib', expected none; use source 'shards'")


@dataclasses.dataclass(frozen=True)
class TextData:
    """The opened text of a run."""

    name: str
    """Name in messages and in the run record."""
    vocab_size: int
    """All tokens are smaller than this. The model's vocabulary must have at least this size."""
    fingerprint: str
    """64 bits in hex that change with the text. A resumed run compares them with its checkpoint."""
    train: TokenStream
    validation: TokenStream

    @property
    def num_tokens(self) -> int:
        """Tokens to train on."""
        return len(self.train)


def open_data(config: DataConfig) -> TextData:
    """Open the streams that ``config`` names. Not collective: each rank opens them by itself.

    Raises:
        SettingsError: a file is missing, damaged, or does not fit its description.
    """
    if config.source == "stdlib":
        train, validation = stdlib_streams()
        digest = hashlib.sha256()
        for stream in (train, validation):
            digest.update(stream.read(0, len(stream)).tobytes())
        return TextData("Python standard library", train.vocab_size, digest.hexdigest()[:16], train, validation)
    folder = Path(str(config.path)).expanduser()
    meta, train, validation = open_shards(folder)
    # Of the description, not of the tokens: reading a large corpus would take minutes.
    fingerprint = hashlib.sha256((folder / META_NAME).read_bytes()).hexdigest()[:16]
    return TextData(str(folder), meta.vocab_size, fingerprint, train, validation)
