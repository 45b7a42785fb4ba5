"""Tokenizers: bytes as tokens, or a ``tokenizer.json`` through the ``tokenizers`` library."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from omn_dist.settings import SettingsError
from omn_dist.train.data.stream import TokenArray

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|eot|>", "</s>", "<eos>", "[SEP]")
"""End-of-document tokens that are looked for in a ``tokenizer.json``, in this order."""


class Tokenizer(Protocol):
    """A tokenizer, as far as shards need one."""

    name: str
    """Name in ``meta.json``."""
    vocab_size: int
    """All tokens are smaller than this."""
    end_of_document: int
    """The token that ends a document."""

    def encode(self, text: bytes) -> TokenArray:
        """Tokens of ``text``, without special tokens; an array with one dimension."""


class ByteTokenizer:
    """Each byte is a token. Token 256 ends a document; no text can contain it."""

    name = "byte"
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: bytes) -> TokenArray:
        """The bytes of ``text`` as uint16."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)


BYTES = ByteTokenizer()
"""The byte tokenizer, which has no settings."""


class JsonTokenizer:
    """A tokenizer that is saved as ``tokenizer.json``.

    Args:
        path: the file.
        end_of_document: the token that ends a document; ``None``: the first of
            ``END_OF_DOCUMENT_NAMES`` that the file has.

    Raises:
        SettingsError: the library or the file is missing, the file cannot be read, or it does not
            have the end-of-document token.
    """

    def __init__(self, path: Path, end_of_document: str | None = None) -> None:
        try:
            from tokenizers import Tokenizer as LibraryTokenizer
        except ImportError:
            raise SettingsError(
                "tokenizer: the tokenizers library is not installed; install omn-dist[hf], or use the byte tokenizer"
            ) from None
        if not path.is_file():
            raise SettingsError(f"tokenizer: found no file {path}, expected 'byte' or the path of a tokenizer.json")
        try:
            self._tokenizer: Any = LibraryTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise SettingsError(f"tokenizer: {path} is not a tokenizer.json: {_first_line(error)}") from error
        self.name = str(path)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        names = END_OF_DOCUMENT_NAMES if end_of_document is None else (end_of_document,)
        found = [vocabulary[name] for name in names if name in vocabulary]
        if not found:
            raise SettingsError(
                f"tokenizer: {path} has none of the end-of-document tokens {', '.join(names)}; name the one that it has"
            )
        self.end_of_document = found[0]

    def encode(self, text: bytes) -> TokenArray:
        """Tokens of UTF-8 ``text`` as uint32."""
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise SettingsError(f"text: {error.reason} at byte {error.start}, expected UTF-8") from error
        return np.asarray(self._tokenizer.encode(decoded, add_special_tokens=False).ids, dtype=np.uint32)


def open_tokenizer(tokenizer: str, end_of_document: str | None = None) -> Tokenizer:
    """A tokenizer by its name.

    Args:
        tokenizer: ``"byte"``, or the path of a ``tokenizer.json``.
        end_of_document: the token of a ``tokenizer.json`` that ends a document; ``None``: the first
            of ``END_OF_DOCUMENT_NAMES`` that it has.

    Raises:
        SettingsError: as in :class:`JsonTokenizer`.
    """
    return BYTES if tokenizer == "byte" else JsonTokenizer(Path(tokenizer), end_of_document)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
