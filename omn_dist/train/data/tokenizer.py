"""Tokenizers: raw bytes, or a local ``tokenizer.json`` through the ``tokenizers`` library."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from omn_dist.settings import SettingsError
from omn_dist.train.data.stream import TokenArray

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|eot|>", "</s>", "<eos>", "[SEP]")
"""Tokens of a ``tokenizer.json`` that are taken for the end of a document, the first that exists."""


class Tokenizer(Protocol):
    """What the writers of shards need of a tokenizer."""

    name: str
    vocab_size: int
    end_of_document: int

    def encode(self, text: bytes) -> TokenArray:
        """Tokens of ``text`` without any special token added; one-dimensional."""


class ByteTokenizer:
    """Token = byte. 257 tokens: the bytes, and 256 for the end of a document, which no text can contain."""

    name = "byte"
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: bytes) -> TokenArray:
        """The bytes of ``text`` as uint16."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)


class JsonTokenizer:
    """A tokenizer saved as ``tokenizer.json``.

    Args:
        path: the file.
        end_of_document: its token for the end of a document; ``None`` takes the first of ``END_OF_DOCUMENT_NAMES`` that
            exists.

    Raises:
        SettingsError: the library or the file is missing, the file cannot be read, or the end token is not in it.
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
    """The tokenizer called ``"byte"``, or the one in the ``tokenizer.json`` at that path."""
    return ByteTokenizer() if tokenizer == "byte" else JsonTokenizer(Path(tokenizer), end_of_document)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
