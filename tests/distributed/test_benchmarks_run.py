"""Each benchmark as a command, at a tiny size: the rows that it prints and their values."""

import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _rows(*command: str) -> dict[str, dict[str, Any]]:
    """What a benchmark prints as JSON, by the names of its rows."""
    answer = subprocess.run(
        [sys.executable, str(BENCHMARKS / command[0]), *command[1:], "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
    printed = json.loads(answer.stdout)
    assert printed["environment"]["torch"]
    for row in printed["rows"]:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row.get("low_ms", 0) <= row.get("median_ms", 0) <= row.get("high_ms", 0)
    return {row["name"]: row for row in printed["rows"]}


def test_forms_dtypes_and_batches_of_newton_schulz() -> None:
    rows = _rows("newton_schulz.py", "--shapes", "16x24", "--batch", "2", "--rounds", "5")
    variants = ("one by one", "batched")
    assert list(rows) == [
        f"{form}, {dtype}, {variant}" for dtype in ("float32", "bfloat16") for variant in variants for form in ("standard", "gram")
    ]
    assert all(row["shape"] == "16x24" for row in rows.values())
    assert rows["standard, float32, one by one"]["of_standard"] == 1
    assert float(rows["gram, float32, batched"]["error"]) < 1e-4


@pytest.mark.distributed
def test_measured_memory_holds_at_least_the_slots() -> None:
    (row,) = _rows("memory.py", "--layers", "1", "--ranks", "2", "--wave-mib", "1").values()
    assert row["name"] == "1 layers, 2 ranks"
    assert row["slots_mb"] == row["plan_mb"]
    assert row["measured_mb"] > 0.9 * row["slots_mb"]
    assert row["waves"] > 1


@pytest.mark.distributed
def test_iterations_with_muon_and_with_adamw() -> None:
    rows = _rows("end_to_end.py", "--ranks", "2", "--layers", "1", "--sequences", "1", "--rounds", "3")
    assert list(rows) == ["DualOptimizer", "AdamW", "Newton-Schulz products", "expected"]
    assert rows["expected"]["median_ms"] > rows["Newton-Schulz products"]["median_ms"]
    assert rows["DualOptimizer"]["of_expected"] > 0
    assert 0 < rows["AdamW"]["step_ms"] < rows["AdamW"]["high_ms"]


@pytest.mark.distributed
def test_communication_on_a_slow_network() -> None:
    reason = runpy.run_path(str(BENCHMARKS / "slow_network.py"))["why_not"]()
    if reason is not None:
        pytest.skip(reason)
    rows = _rows("exposed.py", "--layers", "1", "--wave-mib", "1", "--rounds", "3", "--rate", "200mbit")
    alone = ["pipeline on", "pipeline off", "compute alone", "collectives alone", "backward alone"]
    after_backward = ["exposed after backward", "exposed, gathers in backward", "saved by gathers in backward"]
    shares = ["cost", "exposed", "hidden", "could hide", *after_backward, "hidden waits, of waits"]
    assert list(rows) == [*alone, "backward, then step", "backward, gathers in it, step", "Newton-Schulz in it", *shares]
    assert rows["compute alone"]["waits_ms"] == 0
    # 1.6 MB each way at 25 MB a second.
    assert rows["collectives alone"]["median_ms"] > 60
    assert rows["pipeline off"]["waits_ms"] > 60
    assert rows["cost"]["share"] == 1
