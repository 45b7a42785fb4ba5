"""Files that survive a crash: replaced as a whole, and on disk when the call returns."""

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Replace the content of ``path`` by ``text`` atomically.

    After a crash the file holds the old content or the new one, never a part of either.
    """
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write the entries of ``folder`` to disk, so that renames inside it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
