"""Checks before a run starts: pure functions that return one line for each problem."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omn_dist.launch.network import Interface
from omn_dist.optim.state_bytes import state_bytes_by_algorithm

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which a user chooses the interface of a backend."""

_NUM_CHECKPOINTS = 2

# Facts that must be the same for all members of a run, and their names in messages.
_EQUAL_FACTS = {
    "num_nodes": "machines",
    "ranks_per_node": "ranks per node",
    "configuration": "configuration (SHA-256)",
    "torch": "version of torch",
    "omn_dist": "version of omn_dist",
    "device": "device",
}


def check_interface_choice(variable: str, choice: str, interfaces: Sequence[Interface], num_nodes: int) -> list[str]:
    """Check that chosen interfaces exist, are up, have an address, and lead to other machines."""
    known = ", ".join(f"{interface.name} {interface.address or 'without address'}" for interface in interfaces) or "none"
    lines = []
    if choice.startswith("^"):  # NCCL: all but these
        return []
    for part in choice.lstrip("=").split(","):
        prefix = variable.startswith("NCCL") and not choice.startswith("=")
        matching = [i for i in interfaces if i.name == part or (prefix and i.name.startswith(part))]
        if not matching:
            lines.append(f"{variable}: found no interface {part!r}, expected one of: {known}; correct it or unset it")
        elif not any(i.is_up and i.address for i in matching):
            lines.append(f"{variable}: interface {part!r} is down or has no IPv4 address, expected one of: {known}")
        elif num_nodes > 1 and all(i.is_loopback for i in matching):
            lines.append(
                f"{variable}: interface {part!r} is a loopback, expected one that connects {num_nodes} machines of: {known}"
            )
    return lines


def checkpoint_bytes(groups: Sequence[Mapping[str, Any]], matrix_algorithm: str = "muon") -> int:
    """Bytes of one checkpoint of these parameter groups: weights and optimizer state.

    Args:
        groups: of ``build_parameter_groups``, on any device.
        matrix_algorithm: what the preset runs on groups of matrices.
    """
    weights: int = sum(parameter.numel() * parameter.element_size() for group in groups for parameter in group["params"])
    return weights + sum(state_bytes_by_algorithm(groups, matrix_algorithm).values())


def check_disk(folder: Path, free: int, checkpoint: int, num_saved: int) -> list[str]:
    """Check that there is room for two checkpoints: the last one stays while the next is written.

    Args:
        folder: the run folder.
        free: free bytes there.
        checkpoint: bytes of one checkpoint.
        num_saved: complete checkpoints that the folder has; a run that continues needs room for the
            next one only.
    """
    number = max(1, _NUM_CHECKPOINTS - num_saved)
    needed = number * checkpoint
    if free >= needed:
        return []
    return [
        f"run_folder {folder}: found {free / 2**30:.2f} GiB free, expected at least {needed / 2**30:.2f} GiB for "
        f"{number} {'checkpoint' if number == 1 else 'checkpoints'}; free some, or choose another run_folder"
    ]


def free_bytes(folder: Path) -> int:
    """Free bytes for this user on the file system where ``folder`` is, or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_gpus(device: str, found: int, ranks_per_node: int) -> list[str]:
    """Check that a machine has a GPU for each of its ranks, if the run uses GPUs."""
    if device == "cpu" or (device == "auto" and found == 0) or found >= ranks_per_node:
        return []
    return [
        f"device: found {found} GPUs, expected {ranks_per_node}, one for each rank; use more GPUs, or fewer ranks on each machine"
    ]


def compare_members(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The problems of all members, and the facts that should be equal and are not.

    Args:
        facts: of each member: ``host``, ``problems``, and the facts that must be equal.
    """
    # Without repetitions: members on the same machine find the same problems.
    lines = list(dict.fromkeys(f"{fact['host']}: {problem}" for fact in facts for problem in fact["problems"]))
    for name, meaning in _EQUAL_FACTS.items():
        if len({str(fact[name]) for fact in facts}) > 1:
            found = ", ".join(dict.fromkeys(f"{fact['host']} {fact[name]}" for fact in facts))
            lines.append(f"{meaning}: found {found}, expected the same on all machines; start all with the same command")
    return lines


def check_shared(folder: Path, hosts: Sequence[str], sees: Sequence[bool]) -> list[str]:
    """Check that all machines share the run folder, since every rank writes a part of a checkpoint.

    Args:
        folder: the run folder.
        hosts: name of each member's machine.
        sees: whether each member sees a file that the first machine has written there.
    """
    blind = list(dict.fromkeys(host for host, saw in zip(hosts, sees, strict=True) if not saw))
    if not blind:
        return []
    return [
        f"run_folder {folder}: {', '.join(blind)} does not see what {hosts[0]} writes there, expected a folder that all machines "
        "share; choose one on the shared file system"
    ]


def chosen_interfaces(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The interface variables that are set."""
    environment = os.environ if environment is None else environment
    return {name: environment[name] for name in INTERFACE_VARIABLES if environment.get(name)}
