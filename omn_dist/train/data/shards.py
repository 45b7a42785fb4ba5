"""Token shards: a folder with memory-mapped files of tokens, and a ``meta.json`` about them.

``meta.json`` is the :class:`ShardFolder` below as JSON. A shard is a ``.bin`` file (little-endian
tokens without a header) or a ``.npy`` file with one dimension.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from omn_dist.settings import SettingsError, from_mapping
from omn_dist.train.data.stream import TokenArray, TokenStream, check_vocabulary

META_NAME = "meta.json"
FORMAT_VERSION = 1

TokenType = Literal["uint16", "uint32"]
ShardFormat = Literal["bin", "npy"]

# When a shard is opened, this many tokens at each of its ends are compared with the vocabulary. The
# others are compared when they are read, because a whole large corpus would take minutes.
_NUM_CHECKED = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardFile:
    """One shard."""

    name: str
    """Name of the file in the folder."""
    num_tokens: int
    """Number of its tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardFolder:
    """The content of ``meta.json``: the description of a folder of shards."""

    format: int
    """Version of this description: 1."""
    tokenizer: str
    """``"byte"``, or the path of the ``tokenizer.json`` as it was given."""
    vocab_size: int
    """All tokens are smaller than this."""
    dtype: TokenType
    """Type of a token on disk, little-endian."""
    train: tuple[ShardFile, ...]
    """Shards for training, in their order."""
    validation: tuple[ShardFile, ...]
    """Shards for validation, in their order."""


def storage_type(dtype: TokenType) -> "np.dtype[Any]":
    """The little-endian NumPy dtype of a token on disk."""
    return np.dtype({"uint16": "<u2", "uint32": "<u4"}[dtype])


def read_meta(folder: Path) -> ShardFolder:
    """The checked description of ``folder``.

    Raises:
        SettingsError: the folder or the file is missing, it is no JSON, an entry is wrong or
            missing, its version is unknown, or there are no shards for training or validation.
    """
    path = folder / META_NAME
    if not folder.is_dir():
        raise SettingsError(f"data.path: found no folder {folder}; write one with `omn-dist data prepare`")
    if not path.is_file():
        raise SettingsError(f"data.path: found no {META_NAME} in {folder}; write the folder with `omn-dist data prepare`")
    try:
        values = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not readable as JSON ({error}); prepare the data again") from error
    meta = from_mapping(ShardFolder, values, path=str(path))
    if meta.format != FORMAT_VERSION:
        raise SettingsError(f"{path}: found format {meta.format}, expected {FORMAT_VERSION}; prepare the data again")
    if not 1 <= meta.vocab_size <= np.iinfo(storage_type(meta.dtype)).max + 1:
        raise SettingsError(f"{path}: found vocab_size {meta.vocab_size}, expected what fits in {meta.dtype}")
    for side in ("train", "validation"):
        if not getattr(meta, side):
            raise SettingsError(f"{path}: found no {side} shards, expected at least one")
    return meta


def open_shards(folder: Path) -> tuple[ShardFolder, TokenStream, TokenStream]:
    """The description of ``folder``, and its memory-mapped training and validation streams.

    Raises:
        SettingsError: as in :func:`read_meta` and :func:`open_shard`.
    """
    meta = read_meta(folder)
    streams = [
        TokenStream(
            [open_shard(folder / shard.name, meta, shard.num_tokens) for shard in shards],
            [str(folder / shard.name) for shard in shards],
            meta.vocab_size,
        )
        for shards in (meta.train, meta.validation)
    ]
    return meta, streams[0], streams[1]


def open_shard(path: Path, meta: ShardFolder, num_tokens: int) -> TokenArray:
    """The memory map of one shard.

    Raises:
        SettingsError: the file is missing, or its size, dtype or tokens do not fit the description.
    """
    dtype = storage_type(meta.dtype)
    if not path.is_file():
        raise SettingsError(f"{path}: missing, expected a shard of {num_tokens} tokens; prepare the data again")
    if num_tokens < 1:
        raise SettingsError(f"{path}: {META_NAME} gives it {num_tokens} tokens, expected at least 1; prepare the data again")
    tokens: TokenArray
    if path.suffix == ".bin":
        found, expected = path.stat().st_size, num_tokens * dtype.itemsize
        if found != expected:
            raise SettingsError(
                f"{path}: found {found} bytes, expected {expected} ({num_tokens} tokens of {meta.dtype}); "
                "the file is cut short or damaged, prepare the data again"
            )
        tokens = np.memmap(path, dtype=dtype, mode="r")
    elif path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise SettingsError(f"{path}: not readable as .npy ({error}); prepare the data again") from error
        if tokens.shape != (num_tokens,) or tokens.dtype != dtype:
            raise SettingsError(
                f"{path}: found {tokens.dtype} of shape {tokens.shape}, expected {meta.dtype} of shape "
                f"({num_tokens},); prepare the data again"
            )
    else:
        raise SettingsError(f"{path}: found suffix {path.suffix!r}, expected {' or '.join(get_args(ShardFormat))}")
    check_vocabulary(tokens[:_NUM_CHECKED], meta.vocab_size, str(path))
    check_vocabulary(tokens[-_NUM_CHECKED:], meta.vocab_size, str(path))
    return tokens


class ShardWriter:
    """Writes the tokens for training, or those for validation, as shards.

    Args:
        folder: where the shards are written.
        side: ``"train"`` or ``"validation"``; the beginning of each file name.
        dtype: type of a token on disk.
        shard_format: ``"bin"`` or ``"npy"``.
        shard_tokens: tokens of each shard; the last one may have fewer.
    """

    def __init__(self, folder: Path, side: str, *, dtype: TokenType, shard_format: ShardFormat, shard_tokens: int) -> None:
        self.files: list[ShardFile] = []
        """The shards that were written."""
        self._folder, self._side, self._format = folder, side, shard_format
        self._buffer = np.empty(shard_tokens, dtype=storage_type(dtype))
        self._filled = 0

    def append(self, tokens: TokenArray) -> None:
        """Add ``tokens``, and write each shard that is full."""
        while len(tokens):
            piece = tokens[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            tokens = tokens[len(piece) :]
            if self._filled == len(self._buffer):
                self.finish()

    def finish(self) -> None:
        """Write the tokens that are in memory as a shard, if there are any."""
        if not self._filled:
            return
        name = f"{self._side}-{len(self.files):05d}.{self._format}"
        tokens = self._buffer[: self._filled]
        if self._format == "bin":
            tokens.tofile(self._folder / name)
        else:
            np.save(self._folder / name, tokens)
        self.files.append(ShardFile(name=name, num_tokens=self._filled))
        self._filled = 0
