"""Metrics of a run as JSON lines: one row for each step, validation or rejected window.

Every row has ``kind`` (``train``, ``validation`` or ``rejected``) and ``window``, the number of
windows read so far. A resumed run first drops the rows of windows after its checkpoint, so each
step is in the file once.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omn_dist.settings import SettingsError
from omn_dist.train.files import write_durably

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """All rows of a metrics file. A last line that a killed run did not finish is left out.

    Raises:
        SettingsError: a line before the last one is no JSON object.
    """
    rows: list[Row] = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise SettingsError(f"{path} line {number}: found no JSON object, expected one row a line; repair or move the file")
    return rows


class MetricsFile:
    """Appends rows to a JSON-lines file.

    Args:
        path: the file; its rows of windows after ``resumed_window`` are dropped.
        resumed_window: windows that the resumed checkpoint has read; ``None`` empties the file.
    """

    def __init__(self, path: Path, *, resumed_window: int | None) -> None:
        kept = [] if resumed_window is None else [row for row in read_rows(path) if row["window"] <= resumed_window]
        write_durably(path, "".join(_line(row) for row in kept))
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row and pass it to the operating system."""
        self._file.write(_line(row))
        self._file.flush()

    def sync(self) -> None:
        """Write all rows to disk.

        Call it before a checkpoint is saved, so that every saved step has its row.
        """
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write all rows to disk and close the file."""
        self.sync()
        self._file.close()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_finite(row), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """``value`` with null in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
