"""Machines and ranks of a run, from the variables that SLURM or a user sets."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from omn_dist.settings import SettingsError
from omn_dist.train.meeting_point import MeetingPointError, parse_port

Launcher = Literal["torchrun", "srun"]
"""``torchrun``: one task on each machine starts the ranks there. ``srun``: every task is a rank."""

DEFAULT_PORT = 29_400
"""Port at which the machines meet, without MASTER_PORT."""
# The next port is for torchrun's agents.
_LAST_PORT = 65_534
# Names of torchrun, and of operators that start it, for what is NODES here.
_TORCHRUNS_NODES = ("NNODES", "PET_NNODES")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobLayout:
    """The machines of a run, and which of them this one is."""

    num_nodes: int
    """Number of machines of the run."""
    node_rank: int
    """Number of this machine, 0 .. ``num_nodes`` - 1. All machines meet at machine 0."""
    ranks_per_node: int
    """Number of ranks on each machine."""
    address: str
    """Name or address of machine 0."""
    port: int
    """Port on machine 0 at which all machines meet."""
    origin: str
    """Source of these numbers, for the report."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return self.num_nodes * self.ranks_per_node


def read_layout(environment: Mapping[str, str], ranks_per_node: int, launcher: Launcher = "torchrun") -> JobLayout:
    """The layout of a SLURM job step, or that in NODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.

    Raises:
        SettingsError: numbers contradict each other, or several machines have no address. Nothing
            is guessed: a machine that takes itself for the only one would train its own model.
    """
    if ranks_per_node < 1:
        raise SettingsError(f"ranks per node: found {ranks_per_node}, expected at least 1; set --ranks-per-node")
    in_step = "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment
    if in_step:
        num_nodes, node_rank = read_number(environment, "SLURM_JOB_NUM_NODES"), read_number(environment, "SLURM_NODEID")
        check_tasks(environment, num_nodes, ranks_per_node, launcher)
    elif launcher == "srun":
        raise SettingsError("SLURM_PROCID: not set, expected a task that srun started; use srun, or --launcher torchrun")
    else:
        num_nodes, node_rank = _machines_by_hand(environment)
    return JobLayout(
        num_nodes=num_nodes,
        node_rank=node_rank,
        ranks_per_node=ranks_per_node,
        address=_meeting_address(environment, num_nodes),
        port=parse_port(environment.get("MASTER_PORT", str(DEFAULT_PORT)).strip(), last=_LAST_PORT),
        origin="SLURM's job step" if in_step else "NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT",
    )


def _machines_by_hand(environment: Mapping[str, str]) -> tuple[int, int]:
    num_nodes = read_number(environment, "NODES", 1)
    if "NODE_RANK" in environment and "NODES" not in environment:
        raise SettingsError(
            f"NODES: not set, but NODE_RANK is {environment['NODE_RANK']!r}, expected the number of machines; set it, or unset "
            "NODE_RANK for a run on this machine alone"
        )
    if num_nodes > 1 and "NODE_RANK" not in environment:
        raise SettingsError(
            f"NODE_RANK: not set, but NODES is {num_nodes}; set it to 0 on the machine of MASTER_ADDR, 1 on the next ..."
        )
    node_rank = read_number(environment, "NODE_RANK", 0)
    if num_nodes < 1 or not 0 <= node_rank < num_nodes:
        raise SettingsError(f"NODE_RANK: found {node_rank} with NODES={num_nodes}, expected 0 to NODES - 1")
    for name in _TORCHRUNS_NODES:
        if environment.get(name, str(num_nodes)) != str(num_nodes):
            raise SettingsError(
                f"{name}: found {environment[name]!r}, but NODES is {num_nodes}, expected the same number of machines; set NODES "
                f"and NODE_RANK on every machine, or unset {name}"
            )
    if num_nodes == 1 and environment.get("WORLD_SIZE", "1") != "1":
        raise MeetingPointError(
            f"WORLD_SIZE: found {environment['WORLD_SIZE']!r}, set by another launcher, but NODES is 1, expected one launcher that "
            "starts the ranks; start omn-dist train with that launcher, or set NODES and NODE_RANK on every machine"
        )
    return num_nodes, node_rank


def _meeting_address(environment: Mapping[str, str], num_nodes: int) -> str:
    address = environment.get("MASTER_ADDR", "").strip()
    if address:
        return address
    if num_nodes > 1:
        raise SettingsError(
            f"MASTER_ADDR: not set, but the run has {num_nodes} machines; set it to the name of the first machine "
            "(slurm/train.sbatch asks scontrol for it)"
        )
    return "127.0.0.1"


def read_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The whole number in an environment variable.

    Raises:
        SettingsError: the variable is not set and there is no default, or it is no whole number. An
            empty one is none either: a variable of a script that was not filled in.
    """
    if name not in environment and default is not None:
        return default
    text = environment.get(name, "").strip()
    if not re.fullmatch(r"\d+", text):
        raise SettingsError(f"{name}: found {text!r}, expected a whole number")
    return int(text)


def check_tasks(environment: Mapping[str, str], num_nodes: int, ranks_per_node: int, launcher: Launcher) -> None:
    """Check that srun has started the tasks that the run needs.

    Raises:
        SettingsError: it has not; the message has both numbers.
    """
    expected = 1 if launcher == "torchrun" else ranks_per_node
    meaning = "one a node" if launcher == "torchrun" else f"one a rank, {ranks_per_node} a node"
    remedy = f"start them with srun --nodes={num_nodes} --ntasks-per-node={expected}"
    found = read_number(environment, "SLURM_STEP_NUM_TASKS")
    nodes = read_number(environment, "SLURM_STEP_NUM_NODES")
    if nodes != num_nodes:
        raise SettingsError(f"SLURM_STEP_NUM_NODES: found {nodes} nodes in this step, expected the job's {num_nodes}; {remedy}")
    if found != expected * num_nodes:
        raise SettingsError(
            f"SLURM_STEP_NUM_TASKS: found {found} tasks on {num_nodes} nodes, expected {expected * num_nodes}, {meaning}; {remedy}"
        )
    by_node = tasks_by_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if any(tasks != expected for tasks in by_node):
        raise SettingsError(
            f"SLURM_STEP_TASKS_PER_NODE: found {environment['SLURM_STEP_TASKS_PER_NODE']}, expected {expected} on every node, "
            f"{meaning}; {remedy}"
        )


def tasks_by_node(text: str) -> tuple[int, ...]:
    """Tasks of each node, from SLURM's short form such as ``2(x3),1``."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise SettingsError(f"SLURM_STEP_TASKS_PER_NODE: found {text!r}, expected the form 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)
