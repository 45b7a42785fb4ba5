"""State with one fp32 number for each row of a parameter's operator, sharded like the rows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from omn_dist.plan.geometry.layout import ShardRegion
from omn_dist.plan.geometry.placement import local_tensor, parameter_layout


def zeros_for_rows(name: str, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """fp32 zeros, one for each row of a parameter's operator.

    The shape is the parameter's, with every dim that holds columns cut to one. For a DTensor they
    are a DTensor with the parameter's mesh and placements, but replicated on the mesh axes that
    shard columns: the owner returns the number of a whole row to every shard that holds a part of
    it.

    Raises:
        NotImplementedError: a rank that holds rows without any column, to which nobody would
            return their numbers.
    """
    columns, shape = _column_dims(parameter, group), row_shape(parameter, group)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=torch.float32, device=parameter.device)
    layout = parameter_layout(name, parameter).layout
    for rank in range(layout.world_size):
        sizes = layout.local_shape(rank)
        if not all(sizes[dim] for dim in columns) and all(size for dim, size in enumerate(sizes) if dim not in columns):
            raise NotImplementedError(
                f"parameter {name} of shape {tuple(parameter.shape)}: found a shard of shape {sizes} on rank {rank}, expected "
                "columns in every shard that has rows; choose sizes that the mesh axes divide, or put it on muon"
            )
    local_shape = [1 if dim in columns else size for dim, size in enumerate(local_tensor(parameter).shape)]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return DTensor.from_local(
        torch.zeros(local_shape, dtype=torch.float32, device=parameter.device),
        parameter.device_mesh,
        row_placements(parameter, group),
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(strides),
    )


def row_placements(parameter: DTensor, group: Mapping[str, Any]) -> list[Placement]:
    """The placements of a DTensor of row numbers: replicated on mesh axes that shard columns."""
    columns = _column_dims(parameter, group)
    return [
        Replicate() if not placement.is_replicate() and placement.dim % parameter.ndim in columns else placement  # type: ignore[attr-defined]
        for placement in parameter.placements
    ]


def row_shape(parameter: Tensor, group: Mapping[str, Any]) -> list[int]:
    """The whole parameter's shape with every dim that holds columns of its operator cut to one."""
    columns = _column_dims(parameter, group)
    return [1 if dim in columns else size for dim, size in enumerate(parameter.shape)]


class RowState(NamedTuple):
    """This rank's row numbers of one parameter."""

    local: Tensor
    """``[rows]``; for transposed operators ``[stacks, rows]``."""
    local_rows_each: int
    """Rows of the local tensor, flattened to two dims, that share an entry of the first dim."""
    transposed: bool

    def rows(self, region: ShardRegion) -> Tensor:
        """The entries of a region of the shard, as a view: ``[rows of the operator]``."""
        first = region.local_row // self.local_rows_each
        if self.transposed:
            return self.local[first, region.local_column : region.local_column + region.num_columns]
        return self.local[first : first + region.num_rows]


def row_state(stored: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> RowState:
    """A state tensor of :func:`zeros_for_rows` with what says which rows its entries are."""
    local, local_parameter = local_tensor(stored), local_tensor(parameter)
    transposed = bool(group.get("muon_transposed"))
    flat = local.view(-1, local.shape[-1]) if transposed else local.view(-1)
    num_local_rows = math.prod(local_parameter.shape[:-1])
    return RowState(flat, num_local_rows // len(flat) if len(flat) else 1, transposed)


def _column_dims(parameter: Tensor, group: Mapping[str, Any]) -> Sequence[int]:
    """The dims of the stored parameter that hold columns of its operator."""
    if group.get("muon_transposed"):
        return (parameter.ndim - 2,)
    num_rows = math.prod(group["muon_shape"][:-1]) if group.get("muon_shape") else math.prod(parameter.shape[:-1])
    first = next((dim for dim in range(1, parameter.ndim) if math.prod(parameter.shape[:dim]) == num_rows), parameter.ndim - 1)
    return range(first, parameter.ndim)
