"""Checksums of bits: exact, and different for every difference."""

import pytest
import torch
from torch import Tensor

from omn_dist.algorithms import checksum
from omn_dist.algorithms.checksum import checksums, sampled

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def _of(tensor: Tensor) -> int:
    return int(checksums([tensor])[0])


def _gaussian(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 8, 65])
def test_every_single_bit_counts(dtype: torch.dtype, size: int) -> None:
    tensor = _gaussian(size, dtype)
    bits = tensor.view(INTEGERS[dtype.itemsize])
    found = {_of(tensor)}
    for index in range(size):
        for bit in range(8 * dtype.itemsize):
            flip = 1 << bit if bit < 8 * dtype.itemsize - 1 else -1 << bit
            bits[index] ^= flip
            found.add(_of(tensor))
            bits[index] ^= flip
    assert len(found) == 1 + size * 8 * dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_swap_of_two_elements_counts(dtype: torch.dtype) -> None:
    numbers = torch.arange(1.0, 21.0)
    tensor = torch.cat((numbers, -numbers)).to(dtype)
    found, num_swaps = {_of(tensor)}, 0
    for first in range(40):
        for second in range(first):
            if tensor[first].double() != tensor[second].double():
                swapped = tensor.clone()
                swapped[first], swapped[second] = tensor[second], tensor[first]
                found.add(_of(swapped))
                num_swaps += 1
    assert len(found) == 1 + num_swaps


def test_swaps_between_chunks_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_CPU_CHUNK_WORDS", 4)
    tensor = torch.ones(64)
    found = set()
    # Opposite numbers in the upper halves of words differ in the highest bit alone.
    for place in range(1, 64, 2):
        tensor[place] = -1
        found.add(_of(tensor))
        tensor[place] = 1
    assert len(found) == 32


def test_the_bits_count_and_nothing_else() -> None:
    tensor = _gaussian(48).view(6, 8)
    assert _of(tensor) == _of(tensor.clone())
    assert _of(tensor) == _of(tensor.T.contiguous().T), "strides"
    assert _of(tensor) == _of(torch.cat((torch.zeros(1), tensor.view(-1)))[1:]), "another alignment"
    assert _of(tensor) != _of(tensor.T.contiguous())
    assert _of(torch.zeros(3)) != _of(-torch.zeros(3))
    assert _of(torch.full((3,), torch.nan)) == _of(torch.full((3,), torch.nan))
    assert _of(torch._neg_view(tensor)) == _of(-tensor), "a lazy sign"
    assert _of(torch.tensor(1.0)) != _of(torch.tensor(2.0)), "no dims"
    assert checksums([torch.zeros(0), tensor]).shape == (2,)
    assert checksums([]).shape == (0,)


def test_a_tensor_has_its_checksum_in_every_list() -> None:
    tensors = [_gaussian(size) for size in (3, 200_003, 1, 64)]
    assert checksums(tensors).tolist() == [_of(tensor) for tensor in tensors]


def test_a_sample_is_small_and_sees_another_seed() -> None:
    small, large = _gaussian(8_192), _gaussian(1_000_000)
    assert sampled(small).numel() == sampled(large).numel() == 8_192
    assert 4_096 <= sampled(large.view(1000, 1000).T).numel() <= 16_384
    assert _of(sampled(large)) == _of(sampled(large.clone()))
    assert _of(sampled(large)) != _of(sampled(large.flip(0)))
