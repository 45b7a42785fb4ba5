"""QKClip: scales query and key rows after a step to hold attention logits at a threshold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import record_function

from omn_dist.algorithms.qk_clip import DEFAULT_BLOCK, HeadRows, clip_factors, largest_logits, row_factors
from omn_dist.plan.geometry.layout import Region
from omn_dist.plan.geometry.placement import as_matrix, local_tensor, parameter_layout


@dataclass(frozen=True)
class _Weight:
    parameter: Tensor
    rows: HeadRows
    num_rows: int
    regions: tuple[Region, ...]
    """The regions of the weight that this rank holds."""


@dataclass
class _Layer:
    num_heads: int
    weights: list[_Weight]
    largest: Tensor
    """``[heads]``, fp32: largest absolute logits since the last clip, on this rank."""
    observed: bool = False


class QKClip:
    """Scales query and key rows of heads whose largest absolute logit exceeds a threshold.

    The rows are scaled so that this logit becomes the threshold: the published rule, whose formulas
    and source are in ``omn_dist/algorithms/qk_clip.py``.

    Add each attention layer once, report the logits of its forward, and call :meth:`step` after the
    optimizer's::

        clip = QKClip(threshold=100.0)
        query, key = layer.q_proj.weight, layer.k_proj.weight
        clip.add_grouped("layers.0", query, key, num_heads=16, num_key_heads=4)
        # In forward, instead of F.scaled_dot_product_attention. A model that has the maxima itself
        # calls clip.observe.
        mixed = clip.attention("layers.0", q, k, v, is_causal=True, enable_gqa=True)
        ...
        optimizer.step()
        clip.step()

    Models that normalise queries and keys do not need it: their logits are bounded.

    Args:
        threshold: tau, the bound of absolute logits.
        interval: number of steps from one clip to the next. :meth:`attention` computes logits only
            in steps that clip.
        process_group: ranks over which the maximum is taken; ``None``: all ranks of the default
            group, if there is one.

    Each rank scales its own shards, whatever their placement. The maximum over ranks is one
    collective a clip, for all layers together. Heads at or under the threshold keep their bits.
    Momentum is not scaled.
    """

    def __init__(self, *, threshold: float, interval: int = 1, process_group: dist.ProcessGroup | None = None) -> None:
        if not (threshold > 0 and math.isfinite(threshold)):
            raise ValueError(f"threshold: found {threshold!r}, expected a positive number")
        if interval < 1:
            raise ValueError(f"interval: found {interval!r}, expected at least 1")
        self.threshold = threshold
        self.interval = interval
        self._group = process_group
        self._layers: dict[str, _Layer] = {}
        self._num_steps = 0
        self._largest: dict[str, Tensor] = {}

    @property
    def due(self) -> bool:
        """Whether the next :meth:`step` clips and so needs the logits of this forward."""
        return (self._num_steps + 1) % self.interval == 0

    @property
    def largest(self) -> Mapping[str, Tensor]:
        """Largest absolute logits before the last clip, over all ranks, by layer.

        ``[heads]`` for each layer, in fp32.
        """
        return self._largest

    def add_grouped(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        *,
        num_heads: int,
        num_key_heads: int | None = None,
        query_bias: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> None:
        """Add a layer of multi-head or grouped-query attention. Not collective.

        Query and key have separate projections, whose rows hold the heads in order.
        """
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        width = self._width(name, query, num_heads)
        query_rows = HeadRows(num_heads=num_heads, sections=((width, 0.5),))
        key_rows = HeadRows(num_heads=num_key_heads, sections=((self._width(name, key, num_key_heads), 0.5),))
        given = [(query, query_rows), (key, key_rows), (query_bias, query_rows), (key_bias, key_rows)]
        self.add(name, num_heads, [(parameter, rows) for parameter, rows in given if parameter is not None])

    def add_latent(
        self, name: str, query: Tensor, key_value: Tensor, *, num_heads: int, nope_width: int, rope_width: int, value_width: int
    ) -> None:
        """Add a layer of multi-head latent attention. Not collective.

        ``query`` has rows (heads, nope + rope), ``key_value`` has rows (heads, nope + value). The
        down projections and the shared rotary key are not changed.
        """
        query_rows = HeadRows(num_heads=num_heads, sections=((nope_width, 0.5), (rope_width, 1.0)))
        key_rows = HeadRows(num_heads=num_heads, sections=((nope_width, 0.5), (value_width, 0.0)))
        self.add(name, num_heads, [(query, query_rows), (key_value, key_rows)])

    def add(self, name: str, num_heads: int, weights: Sequence[tuple[Tensor, HeadRows]]) -> None:
        """Add a layer of any other arrangement, such as fused projections. Not collective.

        Args:
            name: of the layer.
            num_heads: query heads of the layer.
            weights: each parameter with the rows of its heads.

        Raises:
            ValueError: a name that is taken, heads of a weight that do not divide ``num_heads``, or
                rows that a weight does not have.
        """
        if name in self._layers:
            raise ValueError(f"layer {name}: added twice, expected unique names")
        found = []
        for parameter, rows in weights:
            if num_heads % rows.num_heads:
                raise ValueError(f"layer {name}: found {num_heads} query heads for {rows.num_heads} heads, expected a multiple")
            if rows.end > parameter.shape[0]:
                raise ValueError(
                    f"layer {name}: found a weight of {parameter.shape[0]} rows, expected {rows.end} for {rows.num_heads} heads of "
                    f"{rows.num_rows_each} rows"
                )
            layout = parameter_layout(name, parameter).layout
            rank = parameter_layout(name, parameter).ranks.index(dist.get_rank()) if layout.world_size > 1 else 0
            found.append(_Weight(parameter, rows, parameter.shape[0], layout.regions(rank)))
        device = found[0].parameter.device
        self._layers[name] = _Layer(num_heads, found, torch.zeros(num_heads, dtype=torch.float32, device=device))

    @torch.no_grad()
    def observe(self, name: str, largest: Tensor, *, first_head: int = 0) -> None:
        """Report the largest absolute logits of heads from ``first_head`` on: ``[heads]``.

        For a model that computes them itself. Not collective.
        """
        layer = self._layer(name)
        part = layer.largest[first_head : first_head + len(largest)]
        if len(part) != len(largest):
            raise ValueError(f"layer {name}: found maxima up to head {first_head + len(largest)}, expected {layer.num_heads} heads")
        part.copy_(torch.maximum(part, largest.to(part)))
        layer.observed = True

    def attention(self, name: str, query: Tensor, key: Tensor, value: Tensor, *, first_head: int = 0, **options: Any) -> Tensor:
        """``scaled_dot_product_attention`` with the same options, which also reports its logits.

        Logits are reported only when a clip is due. They are then computed once more in fp32, in
        blocks of 512 positions, which costs about as much as the first product of the attention.
        """
        if self.due:
            found = largest_logits(
                query,
                key,
                scale=options.get("scale"),
                is_causal=options.get("is_causal", False),
                mask=options.get("attn_mask"),
                block=DEFAULT_BLOCK,
            )
            self.observe(name, found, first_head=first_head)
        return F.scaled_dot_product_attention(query, key, value, **options)

    @torch.no_grad()
    def step(self) -> None:
        """Count a step, and clip if it is due. No host synchronisation.

        Collective when a clip is due: all ranks of the group must call it.

        Raises:
            RuntimeError: no logits of a layer were reported since the last clip.
        """
        due = self.due
        self._num_steps += 1
        if not due or not self._layers:
            return
        missing = [name for name, layer in self._layers.items() if not layer.observed]
        if missing:
            raise RuntimeError(
                f"layer {missing[0]}: no logits reported before a clip, expected its forward to call attention or observe"
            )
        with record_function("omn_dist::qk_clip"):
            everything = torch.cat([layer.largest for layer in self._layers.values()])
            if dist.is_initialized() and dist.get_world_size(self._group) > 1:
                dist.all_reduce(everything, dist.ReduceOp.MAX, group=self._group)
            sizes = [layer.num_heads for layer in self._layers.values()]
            for (name, layer), largest in zip(self._layers.items(), torch.split(everything, sizes), strict=True):
                self._largest[name] = largest
                gamma = clip_factors(largest, self.threshold)
                for weight in layer.weights:
                    _scale(weight, row_factors(gamma, weight.rows, weight.num_rows))
                layer.largest.zero_()
                layer.observed = False

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and the maxima of the last clip.

        The number of steps decides when the next clip is due.
        """
        return {"num_steps": self._num_steps, "largest": {name: value.clone() for name, value in self._largest.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` saved.

        Raises:
            ValueError: the state has maxima of a layer that was not added here, or that has another
                number of heads here.
        """
        unknown = sorted(set(state["largest"]) - set(self._layers))
        if unknown:
            raise ValueError(f"layer {unknown[0]}: in the saved state but not added here, expected the same layers")
        for name, value in state["largest"].items():
            if tuple(value.shape) != (self._layers[name].num_heads,):
                raise ValueError(
                    f"layer {name}: found maxima of shape {tuple(value.shape)} in the saved state, expected "
                    f"{self._layers[name].num_heads} heads"
                )
        self._num_steps = int(state["num_steps"])
        self._largest = {name: value.to(self._layers[name].largest.device) for name, value in state["largest"].items()}

    def _layer(self, name: str) -> _Layer:
        if name not in self._layers:
            raise ValueError(f"layer {name}: not added, expected one of {', '.join(self._layers) or '(none)'}")
        return self._layers[name]

    @staticmethod
    def _width(name: str, weight: Tensor, num_heads: int) -> int:
        if weight.shape[0] % num_heads:
            raise ValueError(f"layer {name}: found {weight.shape[0]} rows for {num_heads} heads, expected a multiple")
        return int(weight.shape[0]) // num_heads


def _scale(weight: _Weight, factors: Tensor) -> None:
    """Multiply this rank's regions by the factors of their rows; a factor of one keeps the bits."""
    local = as_matrix(local_tensor(weight.parameter))
    is_bias = weight.parameter.ndim == 1
    columns = 1 if is_bias else math.prod(weight.parameter.shape[1:-1])
    for region in weight.regions:
        part = local[region.at_row : region.at_row + region.num_rows, region.at_column : region.at_column + region.num_columns]
        if is_bias:
            part.mul_(factors[None, region.column : region.column + region.num_columns])
        else:
            part.mul_(factors.repeat_interleave(columns)[region.row : region.row + region.num_rows, None])
