"""The kernels of this machine in all their variants, and numbers to try them on."""

import pytest
import torch
from torch import Tensor

from omn_dist.kernels.cpu.library import FEATURES, Library, NoKernelsError, load_library

SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-45, 3e38, 1.00390625, 1.01171875)
"""Among them numbers whose rounding to bf16 is a tie."""


def _libraries() -> dict[str, Library]:
    """The library in every variant that this CPU has, by its name."""
    try:
        load_library()
    except NoKernelsError:
        return {}
    flags = [",".join(list(FEATURES)[: number + 1]) for number in range(len(FEATURES))]
    return {library.variant: library for library in map(load_library, flags)}


LIBRARIES = _libraries()
usable = pytest.mark.skipif(not LIBRARIES, reason="the kernels were not built")
variants = pytest.mark.parametrize("variant", list(LIBRARIES) or [pytest.param("", marks=usable)])


def numbers(seed: int, *shape: int) -> Tensor:
    """Many magnitudes, with special numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=generator) * torch.logspace(-8, 3, shape[-1] or 1)[: shape[-1]]
    places = torch.randint(0, max(found.numel(), 1), (len(SPECIAL),), generator=generator)
    if found.numel():
        found.view(-1)[places] = torch.tensor(SPECIAL)
    return found


def same(one: Tensor, other: Tensor) -> bool:
    """Equal, zeros with their sign, and not a number in the same places."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(7.0, float("inf"), float("-inf")).view(torch.int16),
        other.nan_to_num(7.0, float("inf"), float("-inf")).view(torch.int16),
    )
