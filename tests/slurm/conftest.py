"""Two hosts, a SLURM on them, and one uninterrupted run, each made once for these tests."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import cluster as slurm
import hosts as machines
import pytest
from launching import environment, launch_command, nodes_environment


@pytest.fixture(scope="package")
def hosts() -> Iterator[Sequence[machines.Host]]:
    """Two machines that a cable connects."""
    if reason := machines.why_not():
        pytest.skip(reason)
    with machines.Hosts() as pair:
        yield pair


@pytest.fixture(scope="package")
def cluster(hosts: Sequence[machines.Host]) -> Iterator[slurm.Cluster]:
    """SLURM on both of them."""
    if reason := slurm.why_not():
        pytest.skip(reason)
    with slurm.Cluster(hosts, environment()) as running:
        yield running


@pytest.fixture(scope="package")
def uninterrupted(hosts: Sequence[machines.Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a training on two hosts without a break."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    started = [host.start(*launch_command(folder), env=nodes_environment(host, hosts), stdout=-1, stderr=-2) for host in hosts]
    outputs = [process.communicate(timeout=slurm.TIMEOUT)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    return folder
