"""The run record: a JSON file with configuration, versions, machines, plans and results."""

import json
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from omn_dist import __version__
from omn_dist.optim.state_bytes import state_bytes
from omn_dist.train.config import RunConfig, to_mapping
from omn_dist.train.files import write_durably
from omn_dist.train.norms import GroupView
from omn_dist.train.ranks import Ranks


def versions() -> dict[str, str | None]:
    """Versions of Python, torch and this package, and the git commit of its source, if any."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "omn_dist": __version__,
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--verify", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def describe_ranks(ranks: Ranks) -> list[dict[str, Any]]:
    """Host and device of every rank, in the order of ranks. Collective: all ranks must call."""
    cuda = ranks.device.type == "cuda"
    name = torch.cuda.get_device_name(ranks.device) if cuda else platform.machine()
    own = {
        "rank": ranks.rank,
        "host": socket.gethostname(),
        "device": str(ranks.device),
        "device_name": name,
        "cpu_threads": torch.get_num_threads(),
    }
    everyone: list[dict[str, Any]] = [own] * ranks.world_size
    dist.all_gather_object(everyone, own)
    return everyone


def describe_optimizer(
    config: RunConfig, groups: Sequence[GroupView], param_groups: Sequence[Mapping[str, Any]], peaks: Sequence[float]
) -> dict[str, Any]:
    """The optimizer's settings as given (``configured``) and by group (``effective``).

    The two can differ: a configured weight decay has no effect where no group decays.
    """
    effective = {
        view.label: {
            "num_parameters": len(view.names),
            "num_elements": sum(parameter.numel() for parameter in view.parameters),
            "peak_learning_rate": peak,
            "weight_decay": float(group["weight_decay"]),
            "state_bytes": sum(state_bytes(parameter, group) for parameter in view.parameters),
        }
        for view, group, peak in zip(groups, param_groups, peaks, strict=True)
    }
    return {
        "configured": {
            "preset": config.optimizer.preset,
            "weight_decay": config.optimizer.weight_decay,
            "overrides": dict(config.optimizer.overrides),
            "rules": dict(config.optimizer.rules),
        },
        "effective": effective,
    }


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record; a crash leaves the old one or the new one."""
    write_durably(path, json.dumps(record, indent=1) + "\n")


def base_record(config: RunConfig, policy: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of the record that need no communication: configuration, precision, versions."""
    return {"configuration": to_mapping(config), "precision": dict(policy), "versions": versions()}
