"""Parameter groups with labels, and norms over all shards of a group."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omn_dist.optim.rules.registry import rule_by_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupView:
    """One parameter group of the optimizer, with a label that is the same on every rank."""

    label: str
    """Name of the group's algorithm, with a suffix where several groups have the same one."""
    clipped: bool
    """Whether raw gradients of this group are clipped, since its update depends on their scale."""
    names: tuple[str, ...]
    """Parameter names, parallel to ``parameters``."""
    parameters: tuple[nn.Parameter, ...]
    """Plain or sharded parameters."""


def view_groups(param_groups: Sequence[dict[str, Any]]) -> tuple[GroupView, ...]:
    """A view of each of an optimizer's ``param_groups``, in their order; empty groups included."""
    labels = [str(group["algorithm"]) for group in param_groups]
    for repeated in [label for label, count in Counter(labels).items() if count > 1]:
        members = [index for index, label in enumerate(labels) if label == repeated]
        suffixes = ["decay" if param_groups[index]["weight_decay"] > 0 else "no_decay" for index in members]
        if len(set(suffixes)) < len(suffixes):
            suffixes = [str(number) for number in range(len(members))]
        for index, suffix in zip(members, suffixes, strict=True):
            labels[index] = f"{repeated}_{suffix}"
    return tuple(
        GroupView(
            label=label,
            clipped=rule_by_name(group["algorithm"]).depends_on_gradient_scale,
            names=tuple(group["param_names"]),
            parameters=tuple(group["params"]),
        )
        for label, group in zip(labels, param_groups, strict=True)
    )


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard, or the tensor itself where it is plain; detached, sharing storage."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def counts_here(parameter: Tensor) -> bool:
    """Whether a sum over ranks counts this rank's part of ``parameter``.

    Exactly one of several replicas counts.
    """
    if not isinstance(parameter, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(
        position == 0 for position, placement in zip(coordinate, parameter.placements, strict=True) if placement.is_replicate()
    )


def local_norms(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Euclidean norms of this rank's parts, fp64, shape (len(tensors),).

    The norm of a finite fp32 tensor is finite in fp64, so a norm that is not finite shows an
    element that is not finite. Not collective; does not wait for the device.
    """
    norms = [torch.linalg.vector_norm(local_part(tensor), dtype=torch.float64) for tensor in tensors]
    return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64, device=device)


def group_square_sums(
    groups: Sequence[GroupView], pick: Callable[[nn.Parameter], Tensor | None], device: torch.device
) -> tuple[Tensor, Tensor]:
    """This rank's part of the squared norm of each group, and whether all its values are finite.

    Not collective. Add the sums of all ranks, then take the root, for the norm of a group.

    Args:
        groups: the groups.
        pick: the tensor to measure for a parameter, such as its gradient; ``None``: leave it out.
        device: device of the results.

    Returns:
        The sums, fp64 of shape (len(groups),), and a boolean scalar. The sums count one of several
        replicas; the boolean covers the replica of this rank in any case.
    """
    sums = torch.zeros(len(groups), dtype=torch.float64, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    for index, group in enumerate(groups):
        measured = [(parameter, pick(parameter)) for parameter in group.parameters]
        present = [(parameter, tensor) for parameter, tensor in measured if tensor is not None]
        norms = local_norms([tensor for _, tensor in present], device)
        finite &= norms.isfinite().all()
        counted = [position for position, (parameter, _) in enumerate(present) if counts_here(parameter)]
        if counted:
            sums[index] = norms[counted].square().sum()
    return sums, finite


class UpdateNorms:
    """Norms of the change that a step makes: parameters after it minus parameters before it."""

    def __init__(self, groups: Sequence[GroupView], device: torch.device) -> None:
        self._groups = groups
        self._device = device
        self._before: dict[nn.Parameter, Tensor] = {}

    def remember(self) -> None:
        """Copy this rank's parameter shards, before the step. Not collective.

        The copies take memory until :meth:`measure`.
        """
        self._before = {p: local_part(p).clone() for group in self._groups for p in group.parameters}

    def measure(self) -> dict[str, float]:
        """Norm of the change by group label; frees the copies. Collective: one all-reduce."""
        for parameter, before in self._before.items():
            before.sub_(local_part(parameter))
        sums, _ = group_square_sums(self._groups, self._before.get, self._device)
        self._before = {}
        if dist.is_initialized():
            dist.all_reduce(sums)
        return {group.label: value for group, value in zip(self._groups, sums.sqrt().tolist(), strict=True)}
