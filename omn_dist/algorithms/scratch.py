"""Working memory that is allocated once and used by every call."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Scratch:
    """Named buffers that only grow.

    A tensor stays valid until the same name is taken again: then its content is overwritten.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._views: dict[tuple[str, torch.dtype, torch.device, Sequence[int]], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor of this shape with arbitrary content."""
        # Models have few shapes, and making a view at every use would cost time in a step.
        view = self._views.get((name, dtype, device, shape))
        if view is None:
            view = self._views[name, dtype, device, shape] = self._buffer(name, math.prod(shape), dtype, device).view(shape)
        return view

    def _buffer(self, name: str, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = self._buffers.get((name, dtype, device))
        if buffer is None or buffer.numel() < num_elements:
            self._views = {key: view for key, view in self._views.items() if key[:3] != (name, dtype, device)}
            buffer = self._buffers[name, dtype, device] = torch.empty(num_elements, dtype=dtype, device=device)
        return buffer[:num_elements]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
