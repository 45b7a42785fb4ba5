"""The row moment of a parameter: one fp32 number for each row of its operator, sharded like the rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from omn_dist.plan.layout import Segment
from omn_dist.plan.placement import local_tensor, placed

STATE_KEY = "row_moment"


def row_moment_like(name: str, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Zeros for the rows of a parameter: its shape with every dim that holds columns of the operator cut down to one.

    A DTensor with the parameter's mesh and placements, but replicated on the mesh axes that shard columns: the owner returns
    the moment of whole rows to every shard that holds a part of them.

    Raises:
        NotImplementedError: a rank that holds rows without any column, to which nobody would return their moment.
    """
    columns = _column_dims(parameter, group)
    shape = [1 if dim in columns else size for dim, size in enumerate(parameter.shape)]
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=torch.float32, device=parameter.device)
    layout = placed(name, parameter).layout
    for rank in range(layout.world_size):
        sizes = layout.local_shape(rank)
        if not all(sizes[dim] for dim in columns) and all(size for dim, size in enumerate(sizes) if dim not in columns):
            raise NotImplementedError(
                f"parameter {name} of shape {tuple(parameter.shape)}: found a shard of shape {sizes} on rank {rank}, expected "
                "columns in every shard that has rows; choose sizes that the mesh axes divide, or put it on muon"
            )
    placements: list[Placement] = [
        Replicate() if not placement.is_replicate() and placement.dim % parameter.ndim in columns else placement  # type: ignore[attr-defined]
        for placement in parameter.placements
    ]
    local_shape = [1 if dim in columns else size for dim, size in enumerate(local_tensor(parameter).shape)]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return DTensor.from_local(
        torch.zeros(local_shape, dtype=torch.float32, device=parameter.device),
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(strides),
    )


@dataclass(frozen=True)
class RowMoment:
    """This rank's row moment of one parameter."""

    local: Tensor
    """``[rows]``; for transposed operators ``[stacks, rows]``."""
    local_rows_each: int
    """Rows of the local tensor, looked at as a matrix, that share an entry of the first dim."""
    transposed: bool

    @classmethod
    def of_state(cls, parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Self | None:
        """The moment in a parameter's optimizer state; ``None`` for algorithms without one."""
        if STATE_KEY not in state:
            return None
        moment, local = local_tensor(state[STATE_KEY]), local_tensor(parameter)
        transposed = bool(group.get("muon_transposed"))
        flat = moment.view(-1, moment.shape[-1]) if transposed else moment.view(-1)
        num_local_rows = math.prod(local.shape[:-1])
        return cls(flat, num_local_rows // len(flat) if len(flat) else 1, transposed)

    def rows(self, segment: Segment) -> Tensor:
        """The entries of a rectangle of the shard, as a view: ``[rows of the operator]``."""
        first = segment.local_row // self.local_rows_each
        if self.transposed:
            return self.local[first, segment.local_column : segment.local_column + segment.num_columns]
        return self.local[first : first + segment.num_rows]


def _column_dims(parameter: Tensor, group: Mapping[str, Any]) -> range | tuple[int, ...]:
    """The dims of the stored parameter that hold columns of its operator."""
    if group.get("muon_transposed"):
        return (parameter.ndim - 2,)
    num_rows = math.prod(group["muon_shape"][:-1]) if group.get("muon_shape") else math.prod(parameter.shape[:-1])
    return range(
        next((count for count in range(1, parameter.ndim) if math.prod(parameter.shape[:count]) == num_rows), parameter.ndim - 1),
        parameter.ndim,
    )
