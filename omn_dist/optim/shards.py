"""This rank's shards as the rules see them: views of parameters, gradients and state, made once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from omn_dist.optim.row_state import RowState, row_state
from omn_dist.optim.rules.registry import matrix_rule
from omn_dist.optim.rules.rule import MatrixRule
from omn_dist.optim.state import MASTER, check_local, follow_parameter
from omn_dist.plan.geometry.layout import ShardRegion
from omn_dist.plan.geometry.matrix import Matrix
from omn_dist.plan.geometry.placement import as_matrix, local_tensor

Gradients = Mapping[Tensor, Tensor | None]
"""The local gradient of each parameter, ``None`` where it has none."""


def checked_gradient(name: str, parameter: Tensor) -> Tensor | None:
    """The local part of the parameter's gradient, or ``None``.

    Raises:
        ValueError: a gradient of another layout, kind, placement or shape than the parameter.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise ValueError(f"parameter {name}: found a gradient of layout {gradient.layout}, expected a dense one")
    if isinstance(parameter, DTensor) != isinstance(gradient, DTensor):
        raise ValueError(
            f"parameter {name}: found a {type(gradient).__name__} as gradient of a {type(parameter).__name__}, expected both alike"
        )
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        found = (gradient.device_mesh, gradient.placements)
        if found != (parameter.device_mesh, parameter.placements):
            raise ValueError(
                f"parameter {name}: found a gradient with placements {gradient.placements} on {gradient.device_mesh}, expected "
                f"{parameter.placements} on {parameter.device_mesh}; reduce it before the step"
            )
    local = local_tensor(gradient)
    if local.shape != local_tensor(parameter).shape:
        raise ValueError(
            f"parameter {name}: found a gradient of local shape {tuple(local.shape)}, expected "
            f"{tuple(local_tensor(parameter).shape)}"
        )
    return local


class MatrixShard:
    """This rank's part of one parameter with its state, looked at as matrices.

    Views are made once. When a program exchanged the memory of a parameter or of its state, they
    are made again.
    """

    def __init__(self, name: str, parameter: Tensor, group: dict[str, Any]) -> None:
        self.name, self.parameter, self.group = name, parameter, group
        self.rule: MatrixRule = matrix_rule(group["algorithm"])
        self.settings: Any = None
        self.gradient: Tensor | None = None
        self.version = 0
        """Counts how often views were made, for the regions that keep parts of them."""
        self.stepped: Tensor
        """What the step acts on: the fp32 master where there is one."""
        self.rounded: Tensor | None = None
        """The half-precision parameter that follows its master."""
        self.elements: dict[str, Tensor] = {}
        self.rows: dict[str, RowState] = {}
        self._extents = dict(self.rule.state(group))
        self._seen: list[tuple[Any, ...]] = []

    def begin(self, state: Mapping[str, Any], gradient: Tensor | None, settings: Any) -> None:
        """Take up a step; with new views where memory was exchanged."""
        self.settings = settings
        self.gradient = None if gradient is None else as_matrix(gradient, read_only=True)
        kept = {key: state[key] for key in self._extents}
        master = state.get(MASTER)
        tensors = [local_tensor(tensor) for tensor in (self.parameter, *kept.values())]
        tensors += [] if master is None else [local_tensor(master)]
        seen = [(tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in tensors]
        if seen != self._seen:
            self._make_views(kept, master)
            self._seen = seen
        if self.rounded is not None:
            follow_parameter(self.stepped, self.rounded)

    def _make_views(self, kept: Mapping[str, Tensor], master: Tensor | None) -> None:
        of_elements = {key: local_tensor(kept[key]) for key in kept if self._extents[key] == "elements"}
        check_local(self.name, local_tensor(self.parameter), of_elements)
        local = as_matrix(local_tensor(self.parameter).detach())
        self.stepped = local if master is None else as_matrix(local_tensor(master))
        self.rounded = None if master is None else local
        by_extent = {extent: [key for key in kept if self._extents[key] == extent] for extent in ("elements", "rows")}
        self.elements = {key: as_matrix(local_tensor(kept[key])) for key in by_extent["elements"]}
        self.rows = {key: row_state(kept[key], self.parameter, self.group) for key in by_extent["rows"]}
        self.version += 1


class Zeros:
    """Views of zeros that nothing writes to, for missing gradients."""

    def __init__(self) -> None:
        self._by_kind: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Zeros of the shape, dtype and device of ``tensor``."""
        kind = tensor.dtype, tensor.device
        zeros = self._by_kind.get(kind)
        if zeros is None or zeros.numel() < tensor.numel():
            zeros = self._by_kind[kind] = torch.zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        return zeros[: tensor.numel()].view(tensor.shape)


class MatrixRegion:
    """What this rank holds of a matrix. Its views are made once, when they are first asked for."""

    __slots__ = ("_parameter", "_region", "_rounded", "_shard", "_state", "_version", "_zeros", "matrix")

    def __init__(self, matrix: Matrix, shard: MatrixShard, region: ShardRegion, zeros: Zeros) -> None:
        self.matrix = matrix
        self._shard, self._region, self._zeros = shard, region, zeros
        self._version = -1

    @property
    def rule(self) -> MatrixRule:
        """The rule of its group."""
        return self._shard.rule

    @property
    def settings(self) -> Any:
        """Of its group at this step."""
        return self._shard.settings

    @property
    def has_gradient(self) -> bool:
        """Whether this rank has a gradient for the parameter."""
        return self._shard.gradient is not None

    @property
    def parameter(self) -> Tensor:
        """What the step moves."""
        self._refresh()
        return self._parameter

    @property
    def rounded(self) -> Tensor | None:
        """The part of a half-precision parameter that follows its master."""
        self._refresh()
        return self._rounded

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The rule's state, by key."""
        self._refresh()
        return self._state

    @property
    def gradient(self) -> Tensor:
        """The gradient; zeros where it is missing."""
        gradient = self._shard.gradient
        return self._zeros.like(self.parameter) if gradient is None else part_of_shard(gradient, self._region)

    def _refresh(self) -> None:
        shard, region = self._shard, self._region
        if self._version == shard.version:
            return
        self._parameter = part_of_shard(shard.stepped, region).detach()
        self._rounded = None if shard.rounded is None else part_of_shard(shard.rounded, region).detach()
        self._state = {key: part_of_shard(tensor, region).detach() for key, tensor in shard.elements.items()}
        self._state |= {key: rows.rows(region).detach() for key, rows in shard.rows.items()}
        self._version = shard.version


def part_of_shard(local: Tensor, region: ShardRegion) -> Tensor:
    """A region of a shard ``[rows, columns]``, as a view."""
    if local.shape == (region.num_rows, region.num_columns):
        return local
    return local[
        region.local_row : region.local_row + region.num_rows,
        region.local_column : region.local_column + region.num_columns,
    ]
