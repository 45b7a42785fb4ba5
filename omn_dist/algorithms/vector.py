"""Normalised momentum for vectors: each segment of a parameter with one dim moves by a step of its own fixed length.

With d a segment of the momentum direction::

    u <- scale d / |d|
    w <- (1 - lr wd [the segment decays]) w - lr u

That is what normalised Newton-Schulz makes of a matrix with one row, without its polynomial: such a matrix has one singular
value. A segment goes to an owner like a matrix, so its norm is that of the whole segment for every sharding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from omn_dist.algorithms.muon import UpdateSettings
from omn_dist.settings import SettingsError


class VectorSegment(NamedTuple):
    """Elements ``start`` to ``stop`` of a vector."""

    start: int
    stop: int
    scale: float = 1.0
    """Length of the step, in units of the learning rate."""
    has_decay: bool = True


@dataclass(frozen=True, kw_only=True)
class VectorSettings(UpdateSettings):
    """What one group says of one segment at this step."""

    length: float


def vector_segments(name: str, size: int, segments: Sequence[Sequence[float]] | None) -> tuple[VectorSegment, ...]:
    """The segments of a vector of ``size`` elements, one of all elements for ``None``.

    Args:
        name: for messages.
        size: elements of the whole parameter.
        segments: ``(start, stop)``, ``(start, stop, scale)`` or ``(start, stop, scale, has_decay)`` each.

    Raises:
        SettingsError: segments that do not cover every element once, in order.
    """
    found = (VectorSegment(0, size),) if segments is None else tuple(VectorSegment(*segment) for segment in segments)  # type: ignore[arg-type]
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


def transform(directions: Tensor, settings: VectorSettings) -> Tensor:
    """Directions ``[segments, 1, elements]`` to their updates, in fp32; zero gives zero. At the owner, not collective."""
    precise = directions.float()
    largest = precise.abs().amax(dim=-1, keepdim=True)
    scaled = precise / torch.where(largest == 0, 1, largest)
    # A direction that is not zero has a norm of one at least by now.
    norms = torch.stack([torch.linalg.vector_norm(segment) for segment in scaled]).clamp(min=1.0)
    return scaled * (settings.length / norms)[:, None, None]
