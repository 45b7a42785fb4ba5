"""The layout of a parameter, read from its DTensor mesh and placements."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

# Private: what FSDP2 puts on top of tensor parallelism has no public name.
from torch.distributed.tensor.placement_types import _StridedShard

from omn_dist.plan.geometry.layout import REPLICATE, AxisPlacement, Layout

Copies = Literal["share", "repeat"]
"""What ranks with equal copies of a parameter (HSDP, DDP) do with its matrices.

``share``: each matrix has one owner among all copies, and its update is sent to every copy.
``repeat``: every copy orthogonalises every matrix, and nothing is sent between copies."""


# Parameters of one shape and placement share one layout.
_layout = lru_cache(maxsize=4096)(Layout)


@dataclass(frozen=True)
class ParameterLayout:
    """A parameter's layout and the global ranks of its mesh."""

    layout: Layout
    ranks: tuple[int, ...]
    """In ascending order, as in a process group; empty for a plain tensor of one process."""


def parameter_layout(name: str, parameter: Tensor, replicas: tuple[int, ...] = (), copies: Copies = "share") -> ParameterLayout:
    """The layout of ``parameter`` on the ranks that share its matrices.

    Args:
        name: the parameter's name, for messages.
        parameter: a DTensor or a plain tensor.
        replicas: global ranks that hold equal copies of plain tensors; empty for one process.
        copies: ``"repeat"`` restricts the layout to the ranks of this rank's own copy of a DTensor.

    Raises:
        NotImplementedError: a placement other than ``Shard``, ``_StridedShard`` and ``Replicate``,
            or a local tensor whose shape differs from what the placements give.

    Not collective.
    """
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return ParameterLayout(_layout(shape, (max(len(replicas), 1),), (REPLICATE,)), replicas)
    mesh = parameter.device_mesh
    on_mesh = mesh.mesh.flatten().tolist()
    ranks = tuple(sorted(on_mesh))
    layout = _layout(
        shape,
        tuple(mesh.shape),
        tuple(_axis_placement(name, parameter, placement) for placement in parameter.placements),
        () if tuple(on_mesh) == ranks else tuple(on_mesh.index(rank) for rank in ranks),
    )
    if mesh.get_coordinate() is not None:
        rank = ranks.index(mesh.get_rank())
        found, expected = tuple(parameter.to_local().shape), layout.local_shape(rank)
        if found != expected:
            raise NotImplementedError(
                f"parameter {name} of shape {shape}: found a local tensor of shape {found} on rank {rank} of a mesh of shape "
                f"{tuple(mesh.shape)}, expected {expected} from the placements {tuple(parameter.placements)}; choose sizes "
                "that the mesh axes divide"
            )
    return ParameterLayout(layout, ranks) if copies == "share" else _own_copy(layout, ranks, mesh.get_rank())


def _own_copy(layout: Layout, ranks: tuple[int, ...], rank: int) -> ParameterLayout:
    """The layout without its replicated axes, over the ranks that share one copy with ``rank``."""
    mine = layout.replica(ranks.index(rank))
    members = [index for index in range(len(ranks)) if layout.replica(index) == mine]
    axes = [axis for axis, placement in enumerate(layout.placements) if placement != REPLICATE]
    along_mesh = sorted(members, key=lambda index: layout.positions[index] if layout.positions else index)
    positions = tuple(along_mesh.index(index) for index in members)
    return ParameterLayout(
        _layout(
            layout.shape,
            tuple(layout.mesh_shape[axis] for axis in axes),
            tuple(layout.placements[axis] for axis in axes),
            () if positions == tuple(range(len(members))) else positions,
        ),
        tuple(ranks[index] for index in members),
    )


def _axis_placement(name: str, parameter: DTensor, placement: TorchPlacement) -> AxisPlacement:
    if isinstance(placement, _StridedShard):
        return AxisPlacement("strided", placement.dim % parameter.ndim, int(placement.split_factor))
    # Exact types: a subclass may distribute the tensor differently.
    if type(placement) is Shard:
        return AxisPlacement("shard", placement.dim % parameter.ndim)
    if type(placement) is Replicate:
        return REPLICATE
    raise NotImplementedError(
        f"parameter {name} of shape {tuple(parameter.shape)}: found placement {placement} on a mesh of shape "
        f"{tuple(parameter.device_mesh.shape)}, expected Shard or Replicate on every mesh axis"
    )


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the plain tensor itself. Shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_matrix(local: Tensor, *, read_only: bool = False) -> Tensor:
    """A local tensor with its leading dims flattened into rows, as a view.

    Where no view exists, a tensor that is only read is copied; else ``RuntimeError`` is raised.
    """
    if local.ndim == 2:
        return local
    if read_only:
        local = local.contiguous()
    return local.view(-1, local.shape[-1]) if local.numel() else torch.empty_like(local)
