"""Starts the ranks of one machine.

First the machine checks itself, then it meets the other machines and compares the run with theirs.
Only then it starts torchrun's agent, or becomes a rank itself.
"""

import dataclasses
import hashlib
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from omn_dist import __version__
from omn_dist.launch.agent import (
    RELAYED_SIGNALS,
    STOPPED,
    WRONG_INPUT,
    Rendezvous,
    SignalRelay,
    combined_status,
    run_agent,
    thread_limits,
)
from omn_dist.launch.checks import (
    check_disk,
    check_gpus,
    check_shared,
    checkpoint_bytes,
    compare_members,
    free_bytes,
)
from omn_dist.launch.job_layout import JobLayout, read_layout, read_number
from omn_dist.launch.meeting import Meeting
from omn_dist.launch.network import list_interfaces, next_free_port
from omn_dist.launch.report import choose_interface, interface_problems
from omn_dist.settings import SettingsError
from omn_dist.train.checkpointing import complete_checkpoints
from omn_dist.train.config import RunConfig, load_config, to_mapping
from omn_dist.train.meeting_point import MeetingPointError, MissingMembersError, check_address, check_route, resolve
from omn_dist.train.preflight import CHECKPOINTS
from omn_dist.train.setup import build_groups, build_meta_model

MEETING_SECONDS = 120.0
"""Longest wait for the other machines at the start, in seconds."""
_LEAVING_SECONDS = 20.0
_SHARED_SECONDS = 10.0
_NOT_COMPARED = ("run_folder",)


def run_problems(config: RunConfig) -> list[str]:
    """Problems with the run folder: one line each. Allocates no weights."""
    folder = Path(config.run_folder)
    groups = build_groups(config, build_meta_model(config))
    algorithm = config.optimizer.recipe().algorithm
    num_saved = len(complete_checkpoints(folder / CHECKPOINTS))
    return check_disk(folder, free_bytes(folder), checkpoint_bytes(groups, algorithm), num_saved)


def address_problems(address: str, port: int, num_nodes: int, *, is_first: bool) -> list[str]:
    """Why this machine cannot meet the others at ``address``, in one line, or nothing.

    Takes up to a few seconds.
    """
    addresses = resolve(address)
    return check_address(address, addresses, num_nodes) or check_route(address, addresses, port, is_first=is_first)


def meeting_problems(layout: JobLayout) -> list[str]:
    """The same for a machine of a run."""
    return address_problems(layout.address, layout.port, layout.num_nodes, is_first=layout.node_rank == 0)


def machine_problems(config: RunConfig, layout: JobLayout) -> list[str]:
    """Problems of this machine: one line each."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return interface_problems(layout, os.environ) + check_gpus(config.device, found, layout.ranks_per_node) + run_problems(config)


def facts_of(config: RunConfig, layout: JobLayout, problems: Sequence[str]) -> dict[str, Any]:
    """What this machine sends to the others, to be compared."""
    compared = {key: value for key, value in to_mapping(config).items() if key not in _NOT_COMPARED}
    cuda = torch.cuda.is_available() and config.device != "cpu"
    return {
        "host": socket.gethostname(),
        "problems": list(problems),
        "num_nodes": layout.num_nodes,
        "ranks_per_node": layout.ranks_per_node,
        "configuration": hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:12],
        "torch": torch.__version__,
        "omn_dist": __version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


def agree_to_start(meeting: Meeting, member: int, facts: dict[str, Any], folder: Path) -> list[str]:
    """Compare all members, and check that they share the run folder.

    Collective: all members of the meeting must call.

    Returns:
        One line for each problem; the same on all members.
    """
    token = folder / f".shared_{secrets.token_hex(8)}" if member == 0 else None
    if token is not None and not facts["problems"]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            token.touch()
        except OSError as error:
            facts["problems"].append(f"run_folder {folder}: cannot be written: {error.strerror}; choose another run_folder")
    all_facts = meeting.exchange(facts | {"token": None if token is None else token.name})
    problems = compare_members(all_facts)
    if problems:
        if token is not None:
            token.unlink(missing_ok=True)
        return problems
    sees = meeting.exchange(_appears(folder / all_facts[0]["token"]))
    if token is not None:
        token.unlink(missing_ok=True)
    return check_shared(folder, [fact["host"] for fact in all_facts], sees)


def _appears(path: Path) -> bool:
    """Whether ``path`` exists, now or soon.

    Network file systems can show a new file some seconds late.
    """
    deadline = time.monotonic() + _SHARED_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def start_machine(
    config_path: str,
    overrides: Sequence[str],
    *,
    ranks_per_node: int,
    rendezvous: Rendezvous = "static",
    log_folder: Path | None = None,
) -> int:
    """Train with ``ranks_per_node`` ranks on this machine, together with the other machines.

    The other machines are those of :func:`~omn_dist.launch.job_layout.read_layout`. Collective:
    every machine of the run must call.

    Args:
        config_path: YAML file of the run.
        overrides: ``key=value`` for the run.
        ranks_per_node: number of ranks on each machine.
        rendezvous: how the agents of torchrun find each other.
        log_folder: folder for the output of each rank; ``None``: all ranks write to this process's
            own output.

    Returns:
        The exit status, the same on all machines: 0, 1, 2 or 75.

    Raises:
        SettingsError: the run cannot start on this machine.
        MissingMembersError: another machine did not answer.
    """
    with SignalRelay() as relay:
        config = load_config(config_path, overrides)
        layout = read_layout(os.environ, ranks_per_node)
        _refuse_meeting_point(layout)
        problems = machine_problems(config, layout)
        meeting: Meeting | None = None
        if layout.num_nodes > 1:
            meeting = _meet(layout, layout.node_rank, layout.num_nodes, problems)
            problems = agree_to_start(meeting, layout.node_rank, facts_of(config, layout, problems), Path(config.run_folder))
        stop = bool(relay.received)
        if meeting is not None and not problems:
            free = next_free_port(layout.port + 1) if layout.node_rank == 0 else 0
            answers = meeting.exchange([free, stop])
            layout = dataclasses.replace(layout, port=answers[0][0])
            stop = any(asked for _, asked in answers)
        if problems:
            _report(problems, layout.node_rank)
            status = WRONG_INPUT
        elif stop:
            status = STOPPED
        else:
            variables, own_address, _ = choose_interface(layout, list_interfaces(), os.environ)
            os.environ.update(variables | thread_limits(os.environ, ranks_per_node))
            status = run_agent(
                ["-m", "omn_dist", "train", config_path, *overrides],
                layout,
                run_id=os.environ.get("SLURM_JOB_ID", "omn_dist"),
                rendezvous=rendezvous,
                own_address=own_address or "127.0.0.1",
                log_folder=log_folder,
                relay=relay,
            )
        if meeting is not None:
            # Machines do not end at the same moment, and an agent that misses the others fails
            # although its ranks did not. So the statuses of all machines are combined.
            status = combined_status(meeting.leave(status, _LEAVING_SECONDS), asked_to_stop=False)
        return status


def enter_rank(config_path: str, overrides: Sequence[str], *, ranks_per_node: int) -> int | None:
    """Make this process, a task of srun, a rank: set torch's variables and the interface.

    Collective: every task of the job step must call.

    Returns:
        ``None`` if the run can start, else the exit status.

    Raises:
        SettingsError: the run cannot start on this machine.
        MissingMembersError: another task did not answer.
    """
    for number in RELAYED_SIGNALS:
        # Until the training loop handles stop signals there is nothing to save.
        signal.signal(number, _stop_at_once)
    config = load_config(config_path, overrides)
    layout = read_layout(os.environ, ranks_per_node, "srun")
    rank, local_rank = (read_number(os.environ, name) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    _refuse_meeting_point(layout)
    problems = machine_problems(config, layout)
    meeting = _meet(layout, rank, layout.world_size, problems)
    problems = agree_to_start(meeting, rank, facts_of(config, layout, problems), Path(config.run_folder))
    if problems:
        _report(problems, rank)
        meeting.leave(WRONG_INPUT, _LEAVING_SECONDS)
        return WRONG_INPUT
    port = meeting.exchange(next_free_port(layout.port + 1) if rank == 0 else 0)[0]
    variables, _, _ = choose_interface(layout, list_interfaces(), os.environ)
    os.environ.update(variables | thread_limits(os.environ, 1))
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(layout.world_size),
        MASTER_ADDR=layout.address,
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    meeting.leave(0, _LEAVING_SECONDS)
    return None


def _refuse_meeting_point(layout: JobLayout) -> None:
    """Raise what is wrong with the meeting point at once: waiting there could only time out."""
    problems = meeting_problems(layout)
    if problems:
        raise MeetingPointError(f"{socket.gethostname()}: {problems[0]}")


def _meet(layout: JobLayout, member: int, num_members: int, problems: Sequence[str]) -> Meeting:
    try:
        return Meeting(layout.address, layout.port, member=member, num_members=num_members, seconds=MEETING_SECONDS)
    except (SettingsError, MissingMembersError) as error:
        if not problems:
            raise
        # The problem of this machine, such as a wrong interface, may be why nobody answered.
        raise SettingsError(f"{socket.gethostname()}: {problems[0]}") from error


def _report(problems: Sequence[str], member: int) -> None:
    """Print problems that all members know.

    On SLURM all members write to the same log, and only the first one prints.
    """
    if member == 0 or "SLURM_JOB_ID" not in os.environ:
        for problem in problems:
            print(f"omn-dist: {problem}", file=sys.stderr)


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(STOPPED)
