"""Copies of parameters on several ranks: whether they have the same bits."""

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from omn_dist.algorithms.checksum import checksums, sampled
from omn_dist.exchange.grid import Grid, find_difference
from omn_dist.optim.agreement import SharedParameters, shared_parameters
from omn_dist.optim.step import States
from omn_dist.plan.geometry.placement import local_tensor


class _Copy(NamedTuple):
    """A local tensor of which other ranks hold copies."""

    label: str
    tensor: Tensor
    axes: tuple[int, ...]
    """Axes of the grid along which copies are held."""


def warn_of_unequal_copies(groups: Sequence[Mapping[str, Any]], replicas: dist.ProcessGroup | None) -> None:
    """Compare the copies of parameters, and warn on all ranks that share them when some differ.

    Of large tensors two blocks are compared, so that the look costs next to nothing.
    A warning, since memory may be empty until a checkpoint is loaded.

    Args:
        groups: complete groups.
        replicas: ranks that hold equal copies of plain tensors.

    Collective: all ranks of the parameters' meshes and of ``replicas`` call it.
    """
    found = [
        (own.grid, [one._replace(tensor=sampled(one.tensor)) for one in _parameters(own) if one.axes])
        for own in shared_parameters(groups, replicas)
    ]
    for message in _messages(found):
        warnings.warn(
            f"{message}, and copies stay as different as they are: broadcast the weights of one copy or load one checkpoint on all "
            "ranks before the first step; if weights are loaded later, pass verify_replicas=False and call check_replicas() then",
            stacklevel=3,
        )


def check_state_copies(groups: Sequence[Mapping[str, Any]], states: States, replicas: dist.ProcessGroup | None) -> None:
    """Compare the copies of parameters and of their state.

    Args:
        groups, replicas: as in :func:`warn_of_unequal_copies`.
        states: ``optimizer.state``.

    Raises:
        ValueError: on all ranks that share the parameter; it names the first tensor that differs.

    Collective, as :func:`warn_of_unequal_copies`.
    """
    messages, comparable = [], []
    for own in shared_parameters(groups, replicas):
        copies = [*_parameters(own), *_states(own, states)]
        # Checksums are compared by position, so all ranks must have the same list.
        lines = [f"{one.label} in {one.tensor.dtype}, copied along {list(one.axes)}" for one in copies]
        found = find_difference(lines, own.grid, copies[0].tensor.device)
        if found is None:
            comparable.append((own.grid, copies))
        else:
            messages.append(
                f"state: rank {found.first_rank} has {found.first_line}, rank {found.other_rank} has {found.other_line}; expected "
                "the same"
            )
    messages += _messages(comparable)
    if messages:
        raise ValueError(f"{messages[0]}; load one checkpoint on all ranks, or broadcast from one copy")


def _parameters(shared: SharedParameters) -> Iterator[_Copy]:
    for name, parameter, _ in shared.members:
        yield _Copy(f"parameter {name}", local_tensor(parameter), _copy_axes(parameter, parameter))


def _states(shared: SharedParameters, states: States) -> Iterator[_Copy]:
    for name, parameter, _ in shared.members:
        state = states[parameter]
        for key in sorted(state):
            if isinstance(state[key], Tensor):
                yield _Copy(f"state {key!r} of parameter {name}", local_tensor(state[key]), _copy_axes(state[key], parameter))


def _copy_axes(tensor: Tensor, parameter: Tensor) -> tuple[int, ...]:
    """The axes of the parameter's grid along which a parameter or its state is held as copies.

    A plain tensor that belongs to a DTensor, such as a counter, is a copy where its parameter is.
    """
    if not isinstance(parameter, DTensor):
        return (0,)
    mesh = parameter.device_mesh
    placements = tensor.placements if isinstance(tensor, DTensor) else parameter.placements
    placed = [placement for axis, placement in enumerate(placements) if mesh.size(axis) > 1]
    return tuple(axis for axis, placement in enumerate(placed) if placement.is_replicate())


def _messages(found: Sequence[tuple[Grid, Sequence[_Copy]]]) -> list[str]:
    """What differs on each grid. Every grid is compared, so that no rank waits for another."""
    messages = (_message(grid, [one for one in copies if one.axes]) for grid, copies in found)
    return [message for message in messages if message is not None]


@torch.no_grad()
def _message(grid: Grid, copies: Sequence[_Copy]) -> str | None:
    """The first tensor whose copies differ, on all ranks the same. Collective."""
    if not copies:
        return None
    sums = checksums([one.tensor for one in copies])
    differs = torch.zeros_like(sums)
    for axis in range(len(grid.groups)):
        chosen = [index for index, one in enumerate(copies) if axis in one.axes]
        if chosen:
            # The largest complement is the complement of the smallest.
            largest, complement = grid.maxima(torch.stack((sums[chosen], ~sums[chosen])), (axis,)).unbind()
            differs[chosen] |= (largest != ~complement).to(differs.dtype)
    everywhere = grid.maxima(differs).tolist()
    if 1 not in everywhere:
        return None
    first = everywhere.index(1)
    ranks = _two_ranks(grid, copies[first], sums[first])
    return (
        f"{copies[first].label}: ranks {ranks[0]} and {ranks[1]} hold different copies, expected equal ones "
        f"({sum(everywhere)} of {len(copies)} tensors differ)"
    )


def _two_ranks(grid: Grid, differing: _Copy, checksum: Tensor) -> tuple[int, int]:
    """The first two ranks with different copies of one shard, on all ranks the same. Collective."""
    shard = [dist.get_rank(group) for axis, group in enumerate(grid.groups) if axis not in differing.axes]
    place = torch.tensor([dist.get_rank(), *shard], dtype=torch.int64, device=checksum.device)
    table = sorted(grid.gather(torch.cat((place, checksum[None]))).tolist())
    return next(
        (rank, other)
        for (rank, *shard, found), (other, *other_shard, other_found) in itertools.combinations(table, 2)
        if shard == other_shard and found != other_found
    )
