import json
import math
import sys
from pathlib import Path

import pytest

from omn_dist.settings import SettingsError
from omn_dist.train.files import write_durably
from omn_dist.train.metrics import MetricsFile, read_rows
from omn_dist.train.pictures import draw_loss_curve


def _row(window: int, kind: str = "train") -> dict[str, object]:
    return {"kind": kind, "window": window, "step": window, "tokens": 10 * window, "loss": 5.0 - window}


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, resumed_window=None)
    for window in range(1, 5):
        metrics.append(_row(window))
    metrics.append(_row(2, "validation"))
    metrics.close()
    metrics = MetricsFile(path, resumed_window=2)
    metrics.append(_row(3))
    metrics.close()
    assert read_rows(path) == [_row(1), _row(2), _row(2, "validation"), _row(3)]


def test_a_fresh_run_starts_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(_row(1)) + "\n")
    MetricsFile(path, resumed_window=None).close()
    assert read_rows(path) == []


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(_row(1)) + '\n{"kind": "tr')
    assert read_rows(path) == [_row(1)]
    MetricsFile(path, resumed_window=5).close()
    assert path.read_text() == json.dumps(_row(1)) + "\n"


def test_a_damaged_line_inside_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("rubbish\n" + json.dumps(_row(1)) + "\n")
    with pytest.raises(SettingsError, match=r"metrics\.jsonl line 1: found no JSON object"):
        read_rows(path)


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, resumed_window=None)
    metrics.append({"kind": "train", "window": 1, "loss": math.nan, "norms": {"muon": math.inf, "adamw": 1.0}})
    metrics.close()
    assert read_rows(path) == [{"kind": "train", "window": 1, "loss": None, "norms": {"muon": None, "adamw": 1.0}}]


def test_durable_writing_replaces_and_leaves_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_durably(path, "old")
    write_durably(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_loss_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curve.png"
    rows = [_row(1), _row(2), _row(2, "validation"), _row(3) | {"loss": None}, {"kind": "rejected", "window": 4}]
    assert draw_loss_curve(rows, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw_loss_curve([], path)


def test_without_matplotlib_there_is_no_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw_loss_curve([_row(1)], tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []
