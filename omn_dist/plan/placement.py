"""From a parameter, as torch holds it, to its layout as data."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from omn_dist.plan.layout import Layout


@dataclass(frozen=True)
class Placed:
    """A parameter's layout, and the global ranks that it is about: none for a plain tensor."""

    layout: Layout
    ranks: tuple[int, ...]


def placed(name: str, parameter: Tensor, replicas: tuple[int, ...] = ()) -> Placed:
    """How ``parameter`` lies on the ranks.

    Args:
        name: for messages.
        parameter: a DTensor with ``Shard(0)`` on a mesh of one axis, or a plain tensor.
        replicas: global ranks that hold equal copies of plain tensors; empty when this process is on its own.

    Raises:
        NotImplementedError: a DTensor with another placement or more mesh axes.

    Not collective.
    """
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Placed(Layout(shape, max(len(replicas), 1), "replicate"), replicas)
    mesh, placements = parameter.device_mesh, tuple(parameter.placements)
    # An exact type: strided shards derive from Shard on some versions and lie elsewhere.
    if mesh.ndim != 1 or type(placements[0]) is not Shard or placements[0].dim != 0:
        raise NotImplementedError(
            f"parameter {name} of shape {shape}: found placements {placements} on a mesh of shape "
            f"{tuple(mesh.shape)}, expected (Shard(dim=0),) on a mesh of one axis; shard it with fully_shard over such a mesh"
        )
    return Placed(Layout(shape, mesh.size(), "shard"), tuple(mesh.mesh.flatten().tolist()))


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the plain tensor itself. Shares memory; not differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_matrix(local: Tensor) -> Tensor:
    """A local tensor with its leading dims flattened into rows; shares memory."""
    return local.view(-1, local.shape[-1]) if local.numel() else torch.empty_like(local)
