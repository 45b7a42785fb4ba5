"""The command of these tests: the micro model on every host."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster import search_path
from hosts import Host

REPOSITORY = Path(__file__).parents[2]
MICRO = REPOSITORY / "tests" / "micro.yaml"
STEPS = 40
ARGUMENTS = [str(MICRO), "schedule.total_tokens=5120", "logging.validation_every_steps=10"]


def environment() -> dict[str, str]:
    """Variables of a host: this Python and package, one thread, none of an outer launcher."""
    foreign = ("SLURM", "SBATCH", "SRUN", "MASTER_", "GLOO_", "NODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PATH": search_path(), "PYTHON": sys.executable}


def launch_command(run_folder: Path, *options: str) -> list[str]:
    """The command that every machine runs."""
    return [sys.executable, "-m", "omn_dist", "launch", *ARGUMENTS, f"run_folder={run_folder}", *options]


def nodes_environment(host: Host, hosts: Sequence[Host]) -> dict[str, str]:
    """The variables of one of several machines."""
    rank = str(list(hosts).index(host))
    return environment() | {"NODES": str(len(hosts)), "NODE_RANK": rank, "MASTER_ADDR": hosts[0].address}
