"""The C functions compared with torch's operations on samples.

A sample has some thousand numbers of many magnitudes, in odd counts.
"""

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import get_args

import torch
from torch import Tensor

from omn_dist.algorithms.adamw import AdamWCoefficients, AdamWShards, adamw
from omn_dist.algorithms.momentum import MomentumRule, write_directions
from omn_dist.algorithms.updates import apply_updates
from omn_dist.kernels.cpu.elementwise import Elementwise

_DTYPES = (torch.float32, torch.bfloat16)
_SHARDS = (1, 2, 3, 5, 7, 9, 15, 17, 31, 33, 63, 64, 65, 127, 1001)
"""Lengths of shards, which C joins: a root must not depend on its place in a tensor."""


def _directions(kernels: Elementwise) -> bool:
    gradient, momentum = _regions()
    ways = itertools.product(get_args(MomentumRule), (False, True), (False, True), _DTYPES, (0.95, 0.3))
    for rule, nesterov, commit, dtype, coefficient in ways:
        ours, theirs = momentum.clone(), momentum.clone()
        out, expected = (torch.zeros_like(momentum, dtype=dtype) for _ in range(2))
        taken = kernels.write_direction(gradient, ours, out, coefficient, rule, nesterov, commit=commit)
        write_directions([gradient], [theirs], [expected], coefficient, rule, nesterov, commit=commit)
        if not (taken and torch.equal(ours, theirs) and torch.equal(out, expected)):
            return False
    return True


def _updates(kernels: Elementwise) -> bool:
    parameter, update = _regions()
    for dtype in _DTYPES:
        ours, theirs, by = parameter.clone(), parameter.clone(), update.to(dtype)
        taken = kernels.add_update(ours, by, 0.998, 0.013)
        apply_updates([theirs], [by], 0.998, 0.013, cautious=False)
        if not (taken and torch.equal(ours, theirs)):
            return False
    return True


def _adamw(kernels: Elementwise) -> bool:
    """With the whole range of second moments, zero and denormal numbers among them."""
    second = torch.arange(0, 0x7F800000, 0x1FFF3, dtype=torch.int32, device="cpu").view(torch.float32)
    scales = torch.logspace(-9, 2, len(second), dtype=torch.float32, device="cpu")
    parameter, gradient, first = _random(3, len(second)).mul_(scales)
    # Without a gradient the smallest ones stay small.
    gradient[::2] = 0
    lengths = [*_SHARDS, len(second) - sum(_SHARDS)]

    def shards() -> AdamWShards:
        a, b, c, d = ([part.clone() for part in tensor.split(lengths)] for tensor in (parameter, gradient, first, second))
        return AdamWShards(a, b, c, d, [torch.tensor(2.0, dtype=torch.float32, device="cpu") for _ in lengths])

    coefficients = AdamWCoefficients(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    ours, theirs = shards(), shards()
    left = kernels.adamw(ours, coefficients)
    adamw(theirs, coefficients, batch_invariant=True)
    return not left.steps and all(all(map(torch.equal, *lists)) for lists in zip(ours, theirs, strict=True))


def _transposes(kernels: Elementwise) -> bool:
    matrix = torch.arange(300 * 137, dtype=torch.int16, device="cpu").view(300, 137)
    found = torch.zeros(137, 300, dtype=torch.int16, device="cpu")
    return kernels.transpose(found, matrix) and torch.equal(found, matrix.T)


def _regions() -> Tensor:
    """Two regions ``[7, 203]``, with directions half-way between two numbers of bf16 among them."""
    a, b = _random(2, 7, 203).mul_(torch.logspace(-6, 2, 203, dtype=torch.float32, device="cpu"))
    a[0] = (0x3F800000 + 0x8000 * torch.arange(203, dtype=torch.int32, device="cpu")).view(torch.float32)
    b[0] = 0
    return torch.stack((a, b))


def _random(*shape: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


COMPARISONS: Mapping[str, Callable[[Elementwise], bool]] = MappingProxyType(
    {"directions": _directions, "updates": _updates, "AdamW": _adamw, "transposes": _transposes}
)
"""By operation: whether the C functions take the samples, and have torch's bits on them."""
