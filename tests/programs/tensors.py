"""Tensors of random programs: made from seeds, cut for ranks, laid out elsewhere in memory."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from references import local_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """One mesh of each shape for the whole process, since each makes process groups."""
    if shape not in _meshes:
        names = ("copies", "shards")[-len(shape) :]
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[shape]


def gaussian(seed: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(Random(seed).randrange(2**31))
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def part_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut like the parameter."""
    return local_of(whole, parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else whole


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """A local part as a tensor of the parameter's kind."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def sharded(parameter: nn.Parameter, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    whole = parameter.detach()
    local = local_of(whole, mesh, placements)
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def placements(random: Random, num_dims: int, num_axes: int) -> list[Placement]:
    dims = [Shard(min(dim, num_dims - 1)) for dim in (0, 0, 0, 1)]
    return [random.choice((*dims, Replicate())) for _ in range(num_axes)]


def piece(index: Tensor, sizes: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]) -> tuple[int, ...]:
    """Elements of the part at a coordinate of the mesh."""
    for size, position, placement in zip(sizes, coordinate, placements, strict=True):
        if not isinstance(placement, Replicate):
            index = placement._split_tensor(index, size, with_padding=False, contiguous=True)[0][position]  # type: ignore[attr-defined]
    return tuple(index.flatten().tolist())


def elsewhere(local: Tensor, memory: str) -> Tensor:
    """The same numbers column by column, with gaps between rows, or with torch's lazy sign."""
    if memory == "negative":
        return torch._neg_view(-local)
    if memory == "columns":
        return local.mT.contiguous().mT
    return torch.zeros(*local.shape[:-1], local.size(-1) + 3, dtype=local.dtype)[..., 1:-2].copy_(local)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of dictionaries and lists with other tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    return [mapped(item, function) for item in value] if isinstance(value, list) else value
