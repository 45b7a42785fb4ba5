"""Working memory that is allocated once and used again by every call."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Scratch:
    """Named buffers that only grow. What a caller takes under a name is overwritten by the next taker of that name."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor of this shape with arbitrary content."""
        num_elements = 1
        for size in shape:
            num_elements *= size
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < num_elements:
            buffer = self._buffers[key] = torch.empty(num_elements, dtype=dtype, device=device)
        return buffer[:num_elements].view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
