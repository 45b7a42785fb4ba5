"""The default corpus: source files of the Python standard library.

About 12 MB of real text, without a download.
"""

import sysconfig
from pathlib import Path

import numpy as np

from omn_dist.settings import SettingsError
from omn_dist.train.data.split import split_by_file
from omn_dist.train.data.stream import TokenStream
from omn_dist.train.data.tokenizer import BYTES

VALIDATION_FRACTION = 0.05
"""Part of the bytes that is kept for validation."""
SPLIT_SEED = 0
"""Fixed, so that runs with different seeds train and validate on the same files."""

# The tests are repetitive and would be half of all bytes. The other folders are not part of the
# library.
_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# This file is written when Python is built, and holds folders of the machine.
_EXCLUDED_PREFIX = "_sysconfigdata"


def stdlib_files(root: Path | None = None) -> dict[str, bytes]:
    """Contents of the library's non-empty ``.py`` files by relative path, sorted by path.

    Args:
        root: folder of the library; ``None``: that of the running Python. The same version of
            Python gives the same files.

    Raises:
        SettingsError: there are none, as in a Python whose library is compiled or zipped.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    content_by_name: dict[str, bytes] = {}
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        if _EXCLUDED_FOLDERS.isdisjoint(relative.parts) and not path.name.startswith(_EXCLUDED_PREFIX):
            content_by_name[relative.as_posix()] = path.read_bytes()
    content_by_name = {name: content_by_name[name] for name in sorted(content_by_name) if content_by_name[name]}
    if not content_by_name:
        raise SettingsError(
            f"data.source: found no .py file in the standard library folder {folder}; use source 'shards' with prepared text"
        )
    return content_by_name


def stdlib_streams(root: Path | None = None) -> tuple[TokenStream, TokenStream]:
    """Training and validation streams of the corpus, as byte tokens.

    Each file ends in an end-of-document token, and is in exactly one of the streams.
    """
    content_by_name = stdlib_files(root)
    size_by_name = {name: len(content) for name, content in content_by_name.items()}
    train, validation = split_by_file(size_by_name, VALIDATION_FRACTION, SPLIT_SEED)
    return _stream(train, content_by_name, "train"), _stream(validation, content_by_name, "validation")


def _stream(names: list[str], content_by_name: dict[str, bytes], side: str) -> TokenStream:
    end = np.array([BYTES.end_of_document], dtype=np.uint16)
    pieces = [piece for name in names for piece in (BYTES.encode(content_by_name[name]), end)]
    return TokenStream([np.concatenate(pieces)], [f"standard library ({side})"], BYTES.vocab_size)
