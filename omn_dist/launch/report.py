"""The report about a machine: what it has, and what a run would use.

``omn-dist env`` prints it, and a SLURM job has it at the top of its log.
"""

import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from omn_dist import __version__
from omn_dist.launch.checks import check_interface_choice, chosen_interfaces
from omn_dist.launch.job_layout import JobLayout
from omn_dist.launch.network import Interface, list_interfaces
from omn_dist.train.meeting_point import resolve, source_address

_SHOWN_VARIABLES = re.compile(
    r"(MASTER|GLOO|NCCL|TORCH|SLURM_STEP)_\w+|OMN_DIST_(KERNELS|CPU_FLAGS)|NODES|NODE_RANK|OMP_NUM_THREADS|"
    r"CUDA_VISIBLE_DEVICES|SLURMD_NODENAME|"
    r"SLURM_(JOB_(ID|NODELIST|NUM_NODES|PARTITION|GPUS)|NTASKS|TASKS_PER_NODE|CPUS_PER_TASK|NODEID|PROCID|LOCALID|RESTART_COUNT|"
    r"SUBMIT_DIR)"
)


def describe_machine(environment: Mapping[str, str] | None = None) -> list[str]:
    """Versions, devices, interfaces, and variables with an effect on runs: one line each."""
    environment = os.environ if environment is None else environment
    lines = [
        f"host         {socket.gethostname()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, {platform.machine()}",
        f"versions     omn_dist {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        f"devices      {_devices()}",
        f"backends     {', '.join(_backends())}",
    ]
    for interface in list_interfaces():
        state = "up" if interface.is_up else "down"
        lines.append(f"interface    {interface.name}: {interface.address or 'no IPv4 address'}, {state}")
    own_name = socket.gethostname()
    lines.append(f"own name     {own_name} is {', '.join(resolve(own_name)) or 'no address'} here")
    shown = sorted(name for name in environment if _SHOWN_VARIABLES.fullmatch(name))
    lines += [f"variable     {name}={environment[name]}" for name in shown]
    return lines


def _devices() -> str:
    if not torch.cuda.is_available():
        return "CPU only"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _backends() -> list[str]:
    found = [name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there]
    return found or ["none"]


def choose_interface(
    layout: JobLayout, interfaces: Sequence[Interface], environment: Mapping[str, str]
) -> tuple[dict[str, str], str | None, str]:
    """The network interface that the ranks of this machine use.

    Returns:
        Variables to set, the address of this machine, and the reason for the choice in words.
    """
    if layout.num_nodes == 1:
        return {}, "127.0.0.1", "the default interface of each backend: there is only one machine"
    resolved = resolve(layout.address)
    own = source_address(resolved[0]) if resolved else None
    chosen = chosen_interfaces(environment)
    names = [interface.name for interface in interfaces if interface.address == own]
    if not names:
        return {}, own, f"found no interface with the address {own} that leads to {layout.address}"
    variables = {name: names[0] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in chosen}
    reason = f"{names[0]} ({own}): it leads to {layout.address}"
    if chosen:
        reason += "; " + ", ".join(f"{name}={value} was set" for name, value in chosen.items())
    return variables, own, reason


def describe_layout(layout: JobLayout, run_folder: Path | None = None) -> list[str]:
    """What a run would use, and why: one line each."""
    _, _, reason = choose_interface(layout, list_interfaces(), os.environ)
    lines = [
        f"would use    {layout.num_nodes} machines with {layout.ranks_per_node} ranks each, from {layout.origin}",
        f"would meet   at {layout.address}:{layout.port}, this is machine {layout.node_rank}",
        f"would send   through {reason}",
    ]
    return lines if run_folder is None else [*lines, f"run folder   {run_folder.resolve()}"]


def interface_problems(layout: JobLayout, environment: Mapping[str, str]) -> list[str]:
    """Problems with the interfaces that the user chose or a run would choose: one line each."""
    interfaces = list_interfaces()
    lines = [
        line
        for name, choice in chosen_interfaces(environment).items()
        for line in check_interface_choice(name, choice, interfaces, layout.num_nodes)
    ]
    variables, _, reason = choose_interface(layout, interfaces, environment)
    if layout.num_nodes > 1 and not variables and not chosen_interfaces(environment):
        lines.append(f"interface: {reason}, expected one; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME")
    return lines
