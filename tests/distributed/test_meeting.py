"""Ranks that are started by hand, and cannot meet: each says why in one line, soon where it can know."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omn_dist.launch.network import next_free_port

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]
MICRO = REPOSITORY / "tests" / "micro.yaml"
FOREIGN = ("SLURM", "MASTER_", "NODE", "NNODES", "PET_", "GLOO_", "NCCL_", "WORLD_SIZE", "LOCAL_", "RANK", "TORCHELASTIC")
# Python, torch and the package are imported first, on a machine that does other things too.
SOON = 45.0


def start(command: str, folder: Path, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
    """One process of a run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "omn_dist", command, str(MICRO), f"run_folder={folder / 'run'}", *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def one_line(process: "subprocess.Popen[str]", status: int, seconds: float = SOON) -> str:
    """The only line that a process has written, in time."""
    output = process.communicate(timeout=seconds)[0]
    assert process.returncode == status, output
    (line,) = output.splitlines()
    assert line.startswith("omn-dist: ")
    return line


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1", "MASTER_ADDR: '127.0.0.1' is 127.0.0.1 here"),
        ("no.such.host.invalid", "MASTER_ADDR: 'no.such.host.invalid' resolves to no address"),
    ],
)
@pytest.mark.parametrize("node_rank", ["0", "1"])
def test_a_machine_does_not_wait_at_a_wrong_address(tmp_path: Path, address: str, message: str, node_rank: str) -> None:
    process = start("launch", tmp_path, NODES="2", NODE_RANK=node_rank, MASTER_ADDR=address)
    assert message in one_line(process, 2)
    assert not (tmp_path / "run").exists()


def rank(folder: Path, port: int, number: int, *, world_size: int = 2, seconds: float = 60.0) -> "subprocess.Popen[str]":
    """A rank on this machine."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(number), "LOCAL_RANK": "0"}
    return start("train", folder, f"collective_timeout_seconds={seconds}", WORLD_SIZE=str(world_size), **variables)


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    port = next_free_port(23_700)
    line = one_line(rank(tmp_path, port, 0, seconds=4), 1)
    assert f"ranks at 127.0.0.1:{port}: rank 0 of 2 on" in line
    assert "within 4 s (missing 1)" in line
    assert f"within 4 s (nobody listens at 127.0.0.1:{port}" in one_line(rank(tmp_path, port, 1, seconds=4), 1)


@pytest.mark.parametrize(
    ("number", "world_size", "message"),
    [(1, 2, "RANK: found 1 more than once"), (2, 4, "WORLD_SIZE: found ")],
)
def test_ranks_that_contradict_each_other_end_together(tmp_path: Path, number: int, world_size: int, message: str) -> None:
    port = next_free_port(23_800)
    started = time.monotonic()
    processes = [rank(tmp_path, port, 0, world_size=3), rank(tmp_path, port, 1, world_size=3)]
    processes.append(rank(tmp_path, port, number, world_size=3 if number == 1 else world_size))
    lines = [one_line(process, 2) for process in processes]
    assert time.monotonic() - started < SOON
    assert all(message in line for line in lines), lines


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = one_line(rank(tmp_path, port, 0), 2)
    assert f"MASTER_PORT: found {port}, on which" in line
    assert "cannot listen (Address already in use)" in line
