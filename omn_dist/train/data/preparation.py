"""Tokenizes text files into a folder of shards."""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from omn_dist.settings import SettingsError
from omn_dist.train.data.shards import (
    FORMAT_VERSION,
    META_NAME,
    ShardFolder,
    ShardFormat,
    ShardWriter,
    TokenType,
)
from omn_dist.train.data.split import split_by_file
from omn_dist.train.data.tokenizer import BYTES, Tokenizer

# A document is tokenized in pieces of about this many bytes, each cut after a line, so that memory
# does not grow with the size of a file.
_PIECE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class _Document:
    """Bytes ``start`` .. ``stop`` of a text file."""

    path: Path
    start: int
    stop: int


def prepare_text(
    paths: Sequence[str | Path],
    out_folder: str | Path,
    tokenizer: Tokenizer = BYTES,
    *,
    validation_fraction: float = 0.05,
    seed: int = 0,
    shard_tokens: int = 1 << 26,
    shard_format: ShardFormat = "bin",
    progress: bool = True,
) -> ShardFolder:
    """Tokenize text files into a new folder of shards, which is written whole or not at all.

    Each file that is not empty is one document, followed by an end-of-document token. Whole files
    are chosen for validation; a single file is cut in two, after a line.

    Args:
        paths: text files, and folders: all files below them, except hidden ones and those in hidden
            folders.
        out_folder: must not exist, or be an empty folder.
        tokenizer: see :func:`~omn_dist.train.data.tokenizer.open_tokenizer`.
        validation_fraction: part of the bytes that is for validation, between 0 and 1.
        seed: seed of the choice of validation files.
        shard_tokens: tokens of a full shard. Two shards are in memory at a time, one for training
            and one for validation.
        shard_format: ``"bin"`` or ``"npy"``.
        progress: whether to show a progress bar.

    Returns:
        The description that was written as ``meta.json``.

    Raises:
        SettingsError: no text, a missing file, an output that exists, or text that cannot be read.
    """
    out = Path(out_folder).expanduser()
    if shard_tokens < 1:
        raise SettingsError(f"shard_tokens: found {shard_tokens}, expected at least 1")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SettingsError(f"output {out}: exists already and is not overwritten; choose another folder or remove it")
    documents_by_side = _split(_text_files(paths), validation_fraction, seed)
    dtype: TokenType = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"

    # In the same folder as the output, since a rename works within one file system only. The
    # process number gives two commands that run at once different folders.
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        writer_by_side = {
            side: ShardWriter(partial, side, dtype=dtype, shard_format=shard_format, shard_tokens=shard_tokens)
            for side in documents_by_side
        }
        num_bytes = sum(d.stop - d.start for documents in documents_by_side.values() for d in documents)
        with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="tokenize", disable=not progress) as bar:
            for side, documents in documents_by_side.items():
                _write_documents(documents, tokenizer, writer_by_side[side], bar)
        meta = ShardFolder(
            format=FORMAT_VERSION,
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            dtype=dtype,
            train=tuple(writer_by_side["train"].files),
            validation=tuple(writer_by_side["validation"].files),
        )
        (partial / META_NAME).write_text(json.dumps(dataclasses.asdict(meta), indent=1) + "\n", "utf-8")
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return meta


def _text_files(paths: Sequence[str | Path]) -> dict[str, Path]:
    """Files that are not empty by name, sorted. A name is the path as it was given or found."""
    path_by_name: dict[str, Path] = {}
    for given in map(Path, paths):
        if given.is_file():
            path_by_name[given.as_posix()] = given
        elif given.is_dir():
            for path in given.rglob("*"):
                hidden = any(part.startswith(".") for part in path.relative_to(given).parts)
                if path.is_file() and not hidden:
                    path_by_name[path.as_posix()] = path
        else:
            raise SettingsError(f"text: found no file or folder {given}")
    path_by_name = {name: path_by_name[name] for name in sorted(path_by_name) if path_by_name[name].stat().st_size}
    if not path_by_name:
        raise SettingsError(f"text: found no non-empty file in {', '.join(map(str, paths)) or 'an empty list'}")
    return path_by_name


def _split(path_by_name: dict[str, Path], fraction: float, seed: int) -> dict[str, list[_Document]]:
    size_by_name = {name: path.stat().st_size for name, path in path_by_name.items()}
    if len(path_by_name) > 1:
        train, validation = split_by_file(size_by_name, fraction, seed)
        return {
            side: [_Document(path_by_name[name], 0, size_by_name[name]) for name in names]
            for side, names in (("train", train), ("validation", validation))
        }
    if not 0.0 < fraction < 1.0:
        raise SettingsError(f"validation_fraction: found {fraction}, expected a number between 0 and 1")
    ((name, path),) = path_by_name.items()
    size = size_by_name[name]
    with path.open("rb") as file:
        file.seek(int(size * (1.0 - fraction)))
        file.readline()
        cut = file.tell()
    if not 0 < cut < size:
        raise SettingsError(
            f"text {path}: one file of {size} bytes has no line to cut it at for a validation fraction of {fraction}; "
            "give more files, more text or a larger fraction"
        )
    return {"train": [_Document(path, 0, cut)], "validation": [_Document(path, cut, size)]}


def _pieces(document: _Document) -> Iterator[bytes]:
    """The document's bytes in pieces, each cut after a line where there is one."""
    with document.path.open("rb") as file:
        file.seek(document.start)
        left = document.stop - document.start
        while left:
            piece = file.read(min(_PIECE_BYTES, left))
            if len(piece) < left:
                piece += file.readline(left - len(piece))
            if not piece:
                raise SettingsError(f"text {document.path}: became shorter while it was read")
            yield piece
            left -= len(piece)


def _write_documents(documents: list[_Document], tokenizer: Tokenizer, writer: ShardWriter, bar: "tqdm[None]") -> None:
    end = np.array([tokenizer.end_of_document], dtype=np.uint32)
    for document in documents:
        for piece in _pieces(document):
            try:
                tokens = tokenizer.encode(piece)
            except SettingsError as error:
                raise SettingsError(f"{document.path}: {error}") from error
            writer.append(tokens)
            bar.update(len(piece))
        writer.append(end)
    writer.finish()
