"""Checks a SLURM job at its start; the job scripts run this before anything else.

``python -m omn_dist.launch.job --ranks-per-node N CONFIG [KEY=VALUE ...]`` prints ``ADDRESS PORT
FOLDER`` on stdout: where the machines of the job meet, and its run folder. A report for people goes
to stderr. Exit status 2: the job cannot run; there is one line for each reason.
"""

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from omn_dist.launch.agent import WRONG_INPUT
from omn_dist.launch.job_layout import read_number
from omn_dist.launch.network import next_free_port, port_of_job
from omn_dist.launch.report import describe_machine
from omn_dist.launch.start import address_problems, run_problems
from omn_dist.settings import SettingsError
from omn_dist.train.config import load_config
from omn_dist.train.preflight import preflight


def check_job(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m omn_dist.launch.job", description=__doc__)
    parser.add_argument("--ranks-per-node", type=int, required=True, metavar="N")
    parser.add_argument("--below", metavar="NAME", help="use this folder inside the configured run folder as the run folder")
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parsed = parser.parse_args(arguments)
    for line in describe_machine():
        print(line, file=sys.stderr)
    try:
        num_nodes = read_number(os.environ, "SLURM_JOB_NUM_NODES")
        address = first_address(os.environ, num_nodes)
        port = next_free_port(port_of_job(read_number(os.environ, "SLURM_JOB_ID")))
        config = load_config(parsed.config, parsed.overrides)
        if parsed.below is not None:
            config = dataclasses.replace(config, run_folder=str(Path(config.run_folder) / parsed.below))
        problems = address_problems(address, port, num_nodes, is_first=True) + run_problems(config)
        checks = preflight(config, num_nodes * parsed.ranks_per_node)
    except SettingsError as error:
        problems = [str(error)]
    for problem in problems:
        print(f"omn-dist: {problem}", file=sys.stderr)
    if problems:
        return WRONG_INPUT
    start = "a fresh start" if checks.resume is None else f"continues {checks.resume.path}"
    folder = Path(config.run_folder).resolve()
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    print(f"job          {os.environ['SLURM_JOB_ID']}, restart {restart}, {start}, {config.last_step} steps", file=sys.stderr)
    print(f"machines     {num_nodes} with {parsed.ranks_per_node} ranks each, meeting at {address}:{port}", file=sys.stderr)
    print(f"run folder   {folder}", file=sys.stderr)
    print(f"{address} {port} {folder}")
    return 0


def first_address(environment: Mapping[str, str], num_nodes: int) -> str:
    """The address of the job's first node, from SLURM's ``scontrol``.

    Raises:
        SettingsError: ``scontrol`` is missing, fails, or contradicts the variables of the job.
    """
    nodes = _scontrol("show", "hostnames", environment.get("SLURM_JOB_NODELIST", "")).split()
    if len(nodes) != num_nodes:
        raise SettingsError(
            f"SLURM_JOB_NODELIST: found {len(nodes)} nodes in {environment.get('SLURM_JOB_NODELIST', '')!r}, expected "
            f"SLURM_JOB_NUM_NODES = {num_nodes}; start the job with sbatch"
        )
    here = environment.get("SLURMD_NODENAME")
    if here != nodes[0]:
        raise SettingsError(
            f"SLURMD_NODENAME: this script runs on {here!r}, expected the job's first node {nodes[0]}; start it with sbatch"
        )
    match = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", "--oneliner", nodes[0]))
    if match is None:
        raise SettingsError(f"scontrol show node {nodes[0]}: found no NodeAddr, expected one; ask your administrator")
    return match[1]


def _scontrol(*arguments: str) -> str:
    if shutil.which("scontrol") is None:
        raise SettingsError(
            "scontrol: not found on PATH of the job's first node, expected SLURM's command, which lists the nodes and requeues "
            "the job; add the folder of SLURM's commands to PATH"
        )
    answer = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, check=False)
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["no message"])[0]
        raise SettingsError(f"scontrol {' '.join(arguments)}: failed ({reason}); start the job with sbatch")
    return answer.stdout


if __name__ == "__main__":
    sys.exit(check_job())
