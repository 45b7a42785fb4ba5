"""From a parameter, as torch holds it, to its layout as data."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from omn_dist.plan.layout import REPLICATE, Layout, Placement

Copies = Literal["share", "repeat"]
"""What ranks with equal copies (HSDP, DDP) do: ``share`` the matrices, each update crossing to the other copies once; or ``repeat``
the work in every copy, with no traffic between copies."""


# Parameters that lie alike share one layout.
_layout = lru_cache(maxsize=4096)(Layout)


@dataclass(frozen=True)
class Placed:
    """A parameter's layout, and the global ranks that it is about."""

    layout: Layout
    ranks: tuple[int, ...]
    """Sorted, as a process group numbers them; empty for a plain tensor of one process."""


def placed(name: str, parameter: Tensor, replicas: tuple[int, ...] = (), copies: Copies = "share") -> Placed:
    """How ``parameter`` lies on the ranks that work on it together.

    Args:
        name: for messages.
        parameter: a DTensor or a plain tensor.
        replicas: global ranks that hold equal copies of plain tensors; empty when this process is on its own.
        copies: with ``"repeat"`` only the ranks of this rank's own copy of a DTensor.

    Raises:
        NotImplementedError: a placement that no optimizer can follow (``Partial`` and the like), or a local tensor that is
            not what the placements say.

    Not collective.
    """
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Placed(_layout(shape, (max(len(replicas), 1),), (REPLICATE,)), replicas)
    mesh = parameter.device_mesh
    on_mesh = mesh.mesh.flatten().tolist()
    ranks = tuple(sorted(on_mesh))
    layout = _layout(
        shape,
        tuple(mesh.shape),
        tuple(_as_data(name, parameter, placement) for placement in parameter.placements),
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
    return Placed(layout, ranks) if copies == "share" else _own_copy(layout, ranks, mesh.get_rank())


def _own_copy(layout: Layout, ranks: tuple[int, ...], rank: int) -> Placed:
    """The layout without its replicated axes, over the ranks that hold one copy together with ``rank``."""
    mine = layout.replica(ranks.index(rank))
    members = [index for index in range(len(ranks)) if layout.replica(index) == mine]
    kept = [axis for axis, placement in enumerate(layout.placements) if placement != REPLICATE]
    along_mesh = sorted(members, key=lambda index: layout.positions[index] if layout.positions else index)
    positions = tuple(along_mesh.index(index) for index in members)
    return Placed(
        _layout(
            layout.shape,
            tuple(layout.mesh_shape[axis] for axis in kept),
            tuple(layout.placements[axis] for axis in kept),
            () if positions == tuple(range(len(members))) else positions,
        ),
        tuple(ranks[index] for index in members),
    )


def _as_data(name: str, parameter: DTensor, placement: TorchPlacement) -> Placement:
    if isinstance(placement, _StridedShard):
        return Placement("strided", placement.dim % parameter.ndim, int(placement.split_factor))
    # Exact types: other kinds may derive from these and lie elsewhere.
    if type(placement) is Shard:
        return Placement("shard", placement.dim % parameter.ndim)
    if type(placement) is Replicate:
        return REPLICATE
    raise NotImplementedError(
        f"parameter {name} of shape {tuple(parameter.shape)}: found placement {placement} on a mesh of shape "
        f"{tuple(parameter.device_mesh.shape)}, expected Shard or Replicate on every mesh axis"
    )


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the plain tensor itself. Shares memory; not differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_matrix(local: Tensor, *, read_only: bool = False) -> Tensor:
    """A local tensor with its leading dims flattened into rows; shares memory.

    Raises ``RuntimeError`` where they are not rows of one matrix in memory; what is only read is copied there.
    """
    if local.ndim == 2:
        return local
    if read_only:
        local = local.contiguous()
    return local.view(-1, local.shape[-1]) if local.numel() else torch.empty_like(local)
