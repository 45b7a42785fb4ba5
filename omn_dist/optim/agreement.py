"""Whether ranks that share parameters were given the same ones in the same order."""

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from omn_dist.exchange.grid import Grid, find_difference

_NUMBERED = re.compile(r"parameter_\d+")
"""Names that parameters have which were given without one."""


@dataclass(frozen=True)
class SharedParameters:
    """The parameters of one grid of ranks, in the order of the groups."""

    grid: Grid
    members: list[tuple[str, Tensor, Mapping[str, Any]]] = field(default_factory=list)
    """Name, parameter and group of each."""


def shared_parameters(groups: Sequence[Mapping[str, Any]], replicas: dist.ProcessGroup | None) -> list[SharedParameters]:
    """The parameters that this rank shares with others, by grid, in one order on all ranks.

    Plain tensors are shared with ``replicas``. Without it nothing is known about other ranks, and
    they are left out. Not collective.
    """
    by_mesh: dict[DeviceMesh | None, Grid] = {}
    found: dict[Any, SharedParameters] = {}
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            if mesh not in by_mesh:
                by_mesh[mesh] = _grid(mesh, replicas)
            grid = by_mesh[mesh]
            if grid.groups:
                found.setdefault(grid.key, SharedParameters(grid)).members.append((name, parameter, group))
    return [found[key] for key in sorted(found)]


def _grid(mesh: DeviceMesh | None, replicas: dist.ProcessGroup | None) -> Grid:
    """The grid of DTensors on a mesh, or of plain tensors; no groups where nothing is shared."""
    if mesh is not None and mesh.get_coordinate() is not None:
        return Grid.of_mesh(mesh)
    return Grid.of_group(replicas) if mesh is None and replicas is not None else Grid((), ())


def check_agreement(groups: Sequence[Mapping[str, Any]], replicas: dist.ProcessGroup | None) -> None:
    """Compare the parameters that ranks share: names, shapes, dtypes, algorithms and their order.

    Warns where shards have no names and equal shapes, so that another order could not be seen.

    Args:
        groups: complete groups, all of them.
        replicas: ranks that hold equal copies of plain tensors.

    Raises:
        ValueError: on all ranks that share the parameters, with the first difference.

    Collective: all ranks of the parameters' meshes and of ``replicas`` call it.
    """
    shared = shared_parameters(groups, replicas)
    messages = []
    for own in shared:
        found = find_difference(_lines(own), own.grid, own.members[0][1].device)
        if found is not None:
            messages.append(
                f"parameters: ranks {found.first_rank} and {found.other_rank} of {len(own.grid.ranks)} differ, rank "
                f"{found.first_rank} has {found.first_line}, rank {found.other_rank} has {found.other_line}; expected the same "
                "parameters, algorithms and order on all ranks, as build_parameter_groups(model) and "
                "model.named_parameters() give them"
            )
    # Every grid was compared before: ranks that see no difference do not wait for the others.
    if messages:
        raise ValueError(messages[0])
    _warn_of_numbered(shared)


def _lines(shared: SharedParameters) -> list[str]:
    """One line for each parameter: what must be equal on all ranks of the grid.

    Groups are numbered within the grid, since ranks may have other groups elsewhere.
    """
    numbers: dict[int, int] = {}
    lines = []
    for name, parameter, group in shared.members:
        number = numbers.setdefault(id(group), len(numbers))
        lines.append(
            f"{name} {list(parameter.shape)} {parameter.dtype}{_placed(parameter)} in group {number} on {group['algorithm']}"
        )
    return lines


def _placed(parameter: Tensor) -> str:
    return f" {parameter.placements}" if isinstance(parameter, DTensor) else ""


def _warn_of_numbered(shared: Sequence[SharedParameters]) -> None:
    numbered = [
        (name, (tuple(parameter.shape), parameter.dtype, id(group)))
        for own in shared
        for name, parameter, group in own.members
        if _NUMBERED.fullmatch(name)
        and isinstance(parameter, DTensor)
        and not all(one.is_replicate() for one in parameter.placements)
    ]
    count = Counter(kind for _, kind in numbered)
    alike = [name for name, kind in numbered if count[kind] > 1]
    if alike:
        warnings.warn(
            f"{len(alike)} sharded parameters such as {alike[0]} have no names, and others have their shape: if one rank has them "
            "in another order, their shards are mixed up and nothing shows it; give names with build_parameter_groups(model) or "
            "'params': list(model.named_parameters())",
            stacklevel=5,
        )
