"""Checksums of the bits of tensors: exact integers, the same in every run."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_WORD_BYTES = 8
_CPU_CHUNK_WORDS, _CHUNK_WORDS = 2**16, 2**22
"""Words that are mixed at a time. On a CPU they stay in a core's cache."""
_SAMPLE_BLOCK, _SAMPLE_BLOCKS = 4096, 2
_FIRST_FACTOR, _SECOND_FACTOR = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D
"""Odd, so that a product loses no bit. Sources: D. Knuth, MMIX; G. Marsaglia, Xorshift RNGs."""


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """A 64-bit checksum of the bits of each tensor, which depends on where each bit is.

    Equal bits have equal checksums, whatever the strides. -0 differs from 0, and a NaN equals
    itself. Tensors of one shape and dtype that differ in one bit have different checksums. Other
    differences, such as two elements that changed places, go unseen with a chance of 2**-32 or
    less.

    The upper half of each 8-byte word is added to the lower one, the result is multiplied by an odd
    number that belongs to the word's place, and all are added. Integers wrap, so the order of
    additions does not matter. Without the first addition, two words that differ in the highest bit
    alone could change places unseen.

    Args:
        tensors: local, on one device, of any shapes and dtypes with at most 8 bytes an element. Not
            changed. A tensor that is not contiguous is copied.

    Returns:
        ``[tensors]``, int64, on their device. The host does not wait for it.

    Not collective.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    weights = _weights(_CPU_CHUNK_WORDS if tensors[0].is_cpu else _CHUNK_WORDS, tensors)
    return torch.stack([_checksum(tensor.detach().resolve_neg().contiguous().view(-1), weights) for tensor in tensors])


def sampled(tensor: Tensor) -> Tensor:
    """Two blocks of 4,096 elements that are spread over a large tensor; a small one is whole.

    For a first look, whose cost must not be seen. Tensors from different seeds differ in it. Not
    collective.
    """
    elements = tensor.detach().resolve_neg()
    if elements.numel() <= _SAMPLE_BLOCKS * _SAMPLE_BLOCK:
        return elements.reshape(-1)
    if not elements.is_contiguous():  # its first elements along the last dim, without a copy of all
        elements = elements.flatten(0, -2)[: -(-_SAMPLE_BLOCKS * _SAMPLE_BLOCK // elements.shape[-1])].reshape(-1)
    blocks = elements.view(-1)[: elements.numel() // _SAMPLE_BLOCK * _SAMPLE_BLOCK].view(-1, _SAMPLE_BLOCK)
    return blocks[:: max(1, len(blocks) // _SAMPLE_BLOCKS)][:_SAMPLE_BLOCKS]


def _checksum(elements: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=elements.device)
    for chunk in torch.split(elements, len(weights) * _WORD_BYTES // elements.itemsize):
        words = _words(chunk)
        total = total * _FIRST_FACTOR + (words >> 32).add_(words).mul_(weights[: len(words)]).sum()
    return total


def _words(elements: Tensor) -> Tensor:
    """The bits of ``[elements]`` as int64, ``[words]``: a view where there is one, else a copy."""
    num_bytes = elements.numel() * elements.itemsize
    if num_bytes % _WORD_BYTES == 0 and elements.storage_offset() * elements.itemsize % _WORD_BYTES == 0:
        return elements.view(torch.int64)
    words = torch.zeros(math.ceil(num_bytes / _WORD_BYTES), dtype=torch.int64, device=elements.device)
    words.view(elements.dtype)[: elements.numel()].copy_(elements)
    return words


def _weights(most: int, tensors: Sequence[Tensor]) -> Tensor:
    """An odd number for each place in a chunk, for as many places as are needed."""
    longest = max(math.ceil(tensor.numel() * tensor.itemsize / _WORD_BYTES) for tensor in tensors)
    places = torch.arange(1, max(1, min(longest, most)) + 1, dtype=torch.int64, device=tensors[0].device) * _FIRST_FACTOR
    return ((places >> 29).bitwise_xor_(places) * _SECOND_FACTOR).bitwise_or_(1)
