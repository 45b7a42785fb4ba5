"""Normalised momentum for vectors: each segment of a parameter moves by a step of fixed length.

With d a segment of the momentum direction of a parameter with one dim::

    u <- scale d / |d|
    w <- (1 - lr wd [the segment decays]) w - lr u

Newton-Schulz makes the same of a matrix with one row, but for its polynomial: such a matrix has
one singular value. A segment goes to an owner like a matrix, so its norm is that of the whole
segment for every sharding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from omn_dist.exchange.numbers import StackNumbers
from omn_dist.optim.rules.momentum import Momentum, MomentumSettings, momentum_fields
from omn_dist.optim.rules.rule import LocalRegion, Tools
from omn_dist.plan.geometry.layout import Layout, Region
from omn_dist.plan.geometry.matrix import Matrix, Work
from omn_dist.plan.geometry.views import View
from omn_dist.settings import SettingsError


class VectorSegment(NamedTuple):
    """Elements ``start`` to ``stop`` of a vector."""

    start: int
    stop: int
    scale: float = 1.0
    """Length of the step, in units of the learning rate."""
    has_decay: bool = True


@dataclass(frozen=True, kw_only=True)
class VectorSettings(MomentumSettings):
    """What a group on vectors says at one step."""

    segments: tuple[VectorSegment, ...] | None
    """Of each parameter; ``None``: one of all its elements."""

    def segment(self, matrix: Matrix) -> VectorSegment:
        """The segment that went into the plan as ``matrix``."""
        start, length = matrix.region[0].column, matrix.region[0].num_columns
        if self.segments is None:
            return VectorSegment(start, start + length)
        return next(segment for segment in self.segments if segment.start == start)


class Vector(Momentum):
    """Momentum of vectors, each segment at a fixed length."""

    name = "vector"
    label = "Vector"
    takes_matrices = False
    own_fields: ClassVar[Mapping[str, Any]] = MappingProxyType({"segments": None})

    @override
    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        segments = group.get("segments")
        if segments is not None and not (isinstance(segments, Sequence) and all(map(_is_segment, segments))):
            raise SettingsError(f"segments: found {segments!r}, expected (start, stop, scale, has_decay) each, or None")

    @override
    def settings(self, group: Mapping[str, Any]) -> VectorSettings:
        segments = None if group["segments"] is None else tuple(VectorSegment(*part) for part in group["segments"])
        return VectorSettings(**momentum_fields(group), segments=segments)

    @override
    def check_parameter(self, name: str, parameter: Tensor, group: Mapping[str, Any]) -> None:
        if parameter.ndim != 1:
            raise ValueError(
                f"parameter {name}: found shape {tuple(parameter.shape)} in a group on {self.name}, expected one dim; "
                "put it on adamw"
            )

    @override
    def matrices(self, name: str, view: View | None, layout: Layout, group: Mapping[str, Any]) -> list[Matrix]:
        return [
            Matrix(
                f"{name}[{segment.start}:{segment.stop}]",
                name,
                1,
                segment.stop - segment.start,
                (Region(0, segment.start, 1, segment.stop - segment.start, 0, 0),),
                layout,
                work=Work(whole_only=f"algorithm {self.name}"),
            )
            for segment in vector_segments(name, layout.num_columns, group["segments"])
        ]

    @override
    def communication_dtype(self, group: Mapping[str, Any]) -> torch.dtype | None:
        return None

    @override
    def transform(
        self,
        matrices: Sequence[Matrix],
        directions: Tensor,
        settings: VectorSettings,
        numbers: Sequence[StackNumbers],
        tools: Tools,
    ) -> None:
        lengths = [settings.segment(matrix).scale for matrix in matrices]
        directions.copy_(normalized_vectors(directions, lengths))

    @override
    def move(self, region: LocalRegion) -> tuple[float, float, bool]:
        settings: VectorSettings = region.settings
        decay = settings.weight_decay if settings.segment(region.matrix).has_decay else 0.0
        return 1 - settings.lr * decay, settings.lr, settings.cautious_decay


def _is_segment(segment: object) -> bool:
    return isinstance(segment, Sequence) and 2 <= len(segment) <= 4 and all(isinstance(part, int | float) for part in segment)


def vector_segments(name: str, size: int, segments: Sequence[Sequence[float]] | None) -> tuple[VectorSegment, ...]:
    """The segments of a vector of ``size`` elements; for ``None`` one of all, if there are any.

    Args:
        name: of the parameter, for messages.
        size: elements of the whole parameter.
        segments: ``(start, stop)``, ``(start, stop, scale)`` or
            ``(start, stop, scale, has_decay)`` each.

    Raises:
        SettingsError: segments that do not cover every element once, in order.
    """
    if segments is None:
        return (VectorSegment(0, size),) if size else ()
    found = tuple(VectorSegment(*segment) for segment in segments)  # type: ignore[arg-type]
    end = 0
    for segment in found:
        if segment.start != end or segment.stop <= segment.start or not segment.scale >= 0:
            raise SettingsError(
                f"parameter {name}: found segment {tuple(segment)} after element {end}, expected (start, stop, scale, has_decay) "
                f"that starts there and has a scale >= 0; segments cover all {size} elements in order"
            )
        end = segment.stop
    if end != size:
        raise SettingsError(f"parameter {name}: found segments of {end} elements, expected all {size}")
    return found


def normalized_vectors(directions: Tensor, lengths: Sequence[float]) -> Tensor:
    """``[segments, 1, elements]`` to vectors of these lengths, in fp32; zero gives zero."""
    precise = directions.float()
    largest = precise.abs().amax(dim=-1, keepdim=True)
    scaled = precise / torch.where(largest == 0, 1, largest)
    # A direction that is not zero has a norm of at least one by now.
    norms = [torch.linalg.vector_norm(segment).clamp(min=1.0) for segment in scaled]
    return scaled * torch.stack([length / norm for length, norm in zip(lengths, norms, strict=True)])[:, None, None]
