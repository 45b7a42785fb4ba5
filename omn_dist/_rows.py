"""AdamW on rows of matrix parameters that are no matrix, such as the gate rows of a fused projection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from omn_dist._grouping import row_lr
from omn_dist.algorithms.adamw import adamw_update
from omn_dist.plan.layout import Segment, intersect
from omn_dist.plan.placement import as_matrix, local_tensor, placed
from omn_dist.plan.views import View


@dataclass(frozen=True)
class Rows:
    """What this rank holds of the rows of one parameter."""

    parameter: Tensor
    group: Mapping[str, Any]
    segments: tuple[Segment, ...]
    """Rectangles of the local tensor; none where this rank holds no such row."""


def build_rows(groups: Sequence[Mapping[str, Any]]) -> list[Rows]:
    """The rows of all matrix groups whose view has some. Not collective.

    Raises:
        NotImplementedError: a placement that is not supported.
    """
    found = []
    for group in groups:
        view = View.from_group(group)
        if view is None or not view.has_adamw_rows:
            continue
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            place = placed(name, parameter)
            rank = place.ranks.index(dist.get_rank()) if place.ranks else 0
            found.append(Rows(parameter, group, intersect(place.layout.pieces(rank), view.adamw_region(place.layout))))
    return found


class RowsStep:
    """AdamW of all rows at one step, where this rank has a gradient."""

    def __init__(
        self, rows: Sequence[Rows], state: Mapping[Tensor, Mapping[str, Any]], gradients: Mapping[Tensor, Tensor | None]
    ) -> None:
        self._rows = rows
        self._state = state
        self._gradients = gradients

    def run(self) -> None:
        """Update the rows and their state in place; the bits of AdamW on those rows alone. Not collective."""
        with record_function("omn_dist::adamw_rows"):
            for rows in self._rows:
                gradient = self._gradients[rows.parameter]
                if gradient is not None:
                    self._update(rows, gradient)

    def _update(self, rows: Rows, gradient: Tensor) -> None:
        state, group = self._state[rows.parameter], rows.group
        # The step counts gradients of the parameter, on ranks without such rows too.
        step = state["step"].clone()
        state["step"].add_(1)
        if not rows.segments:
            return
        stored, master = rows.parameter.detach(), state.get("master")
        stepped = stored if master is None else master
        written = [as_matrix(local_tensor(tensor)) for tensor in (stepped, state["exp_avg"], state["exp_avg_sq"])]
        sources = (*written, as_matrix(gradient, read_only=True))
        # Rectangles are strided and may be many, and torch's kernels want dense tensors: one dense copy of all of them.
        parameter, first_moment, second_moment, dense_gradient = (_gathered(source, rows.segments) for source in sources)
        adamw_update(
            [parameter],
            [dense_gradient.to(parameter.dtype)],
            [first_moment],
            [second_moment],
            [step],
            lr=row_lr(group),
            betas=tuple(group["adamw_betas"]),
            epsilon=group["adamw_eps"],
            weight_decay=group["adamw_weight_decay"],
            deterministic=True,
        )
        for dense, target in zip((parameter, first_moment, second_moment), written, strict=True):
            _scatter(dense, target, rows.segments)
        if master is not None:
            _scatter(parameter, as_matrix(local_tensor(stored)), rows.segments)


def _rectangle(local: Tensor, segment: Segment) -> Tensor:
    return local[
        segment.local_row : segment.local_row + segment.num_rows,
        segment.local_column : segment.local_column + segment.num_columns,
    ]


def _gathered(local: Tensor, segments: Sequence[Segment]) -> Tensor:
    return torch.cat([_rectangle(local, segment).reshape(-1) for segment in segments])


def _scatter(dense: Tensor, local: Tensor, segments: Sequence[Segment]) -> None:
    parts = torch.split(dense, [segment.num_elements for segment in segments])
    for part, segment in zip(parts, segments, strict=True):
        _rectangle(local, segment).copy_(part.view(segment.num_rows, segment.num_columns))
