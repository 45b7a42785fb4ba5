"""Two hosts, a SLURM on them, and one run that nothing disturbed: each made once."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import cluster as slurm
import hosts as machines
import pytest

REPOSITORY = Path(__file__).parents[2]
MICRO = REPOSITORY / "tests" / "micro.yaml"
STEPS = 40
ARGUMENTS = [str(MICRO), "schedule.total_tokens=5120", "logging.validation_every_steps=10"]


def environment() -> dict[str, str]:
    """Variables of a host: this Python and this package, one thread, nothing of an outer job or launcher."""
    foreign = ("SLURM", "SBATCH", "SRUN", "MASTER_", "GLOO_", "NODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PATH": slurm.search_path(), "PYTHON": sys.executable}


def launch_command(run_folder: Path, *options: str) -> list[str]:
    """The command that every machine runs."""
    return [sys.executable, "-m", "omn_dist", "launch", *ARGUMENTS, f"run_folder={run_folder}", *options]


def nodes_environment(host: machines.Host, hosts: Sequence[machines.Host]) -> dict[str, str]:
    """The variables of one of several machines."""
    rank = str(list(hosts).index(host))
    return environment() | {"NODES": str(len(hosts)), "NODE_RANK": rank, "MASTER_ADDR": hosts[0].address}


@pytest.fixture(scope="session")
def hosts() -> Iterator[Sequence[machines.Host]]:
    """Two machines that a cable joins."""
    if reason := machines.why_not():
        pytest.skip(reason)
    with machines.Hosts() as pair:
        yield pair


@pytest.fixture(scope="session")
def cluster(hosts: Sequence[machines.Host]) -> Iterator[slurm.Cluster]:
    """SLURM on both of them."""
    if reason := slurm.why_not():
        pytest.skip(reason)
    with slurm.Cluster(hosts, environment()) as running:
        yield running


@pytest.fixture(scope="session")
def uninterrupted(hosts: Sequence[machines.Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a training on two hosts without a break."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    started = [host.start(*launch_command(folder), env=nodes_environment(host, hosts), stdout=-1, stderr=-2) for host in hosts]
    outputs = [process.communicate(timeout=slurm.TIMEOUT)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    return folder
