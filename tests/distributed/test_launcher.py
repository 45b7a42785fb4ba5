"""``omn-dist launch`` on one machine: its exit status is that of the ranks; no process is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
MICRO = REPOSITORY / "tests" / "micro.yaml"
TIMEOUT = 240.0


def start(tmp_path: Path, *arguments: str) -> "subprocess.Popen[str]":
    """The launcher with two ranks, its output in a pipe."""
    foreign = ("SLURM", "MASTER_", "NODE", "GLOO_", "NCCL_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "omn_dist", "launch", str(MICRO), f"run_folder={tmp_path / 'run'}", *arguments]
    return subprocess.Popen(
        [*command, "--ranks-per-node", "2"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ranks_of(launcher: int) -> list[int]:
    """Process numbers of the launcher's children."""
    return [int(number) for path in Path(f"/proc/{launcher}/task").glob("*/children") for number in path.read_text().split()]


def test_a_stop_signal_to_the_launcher_saves_and_its_status_says_so(tmp_path: Path) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    # More steps than are taken before the signal, on any machine.
    process = start(tmp_path, "schedule.total_tokens=12800000")
    deadline = time.monotonic() + TIMEOUT
    while not (metrics.exists() and metrics.read_text().count('"kind": "train"') >= 2):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=TIMEOUT)[0]
    assert process.returncode == 75, output
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert f"saved step {int(checkpoint.name.removeprefix('step_'))} of 100000" in output
    assert "Traceback" not in output
    assert not [number for number in ranks if Path(f"/proc/{number}").exists()]


def test_wrong_input_ends_the_launcher_with_one_line(tmp_path: Path) -> None:
    """The ranks find out, not the launcher."""
    process = start(tmp_path, "batch.global_batch=3")
    output = process.communicate(timeout=TIMEOUT)[0]
    assert process.returncode == 2, output
    (line,) = output.splitlines()
    assert line.startswith("omn-dist: batch.global_batch: found 3 on 2 ranks")
