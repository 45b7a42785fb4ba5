"""Directions, updates, AdamW and transposes by elementwise.c, in few passes over memory each.

Each method looks at its tensors first, and says whether it took them. What it does not take, torch
does to the same bits. (The sign of a zero is that of torch's vector loops; their scalar tails
differ from them in it, see docs/numerics.md.)
"""

import ctypes
from itertools import compress

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from omn_dist.algorithms.adamw import AdamWCoefficients, AdamWShards
from omn_dist.algorithms.momentum import MomentumRule
from omn_dist.kernels.cpu.library import Library
from omn_dist.kernels.cpu.memory import addresses, row_places

_RULES: dict[MomentumRule, int] = {"sum": 0, "ema": 1}
_WIDTHS = {torch.float32: 0, torch.bfloat16: 1}

BLOCK_ELEMENTS = 2**17
"""Elements of shards that go through the moments, the root and the update before the next ones.
What is read again, first moments and roots, is 1 MiB; smaller blocks cost more calls."""


class Elementwise:
    """The passes of one library."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def write_direction(
        self,
        gradient: Tensor,
        momentum: Tensor,
        out: Tensor,
        coefficient: float,
        rule: MomentumRule,
        nesterov: bool,
        *,
        commit: bool,
    ) -> bool:
        """One region of :func:`~omn_dist.algorithms.momentum.write_directions`, in fp32.

        ``out`` may be in bf16.
        """
        if not (gradient.dtype == momentum.dtype == torch.float32 and out.dtype in _WIDTHS and rule in _RULES):
            return False
        places = row_places(gradient, momentum, out)
        if places is None:
            return False
        self._library.direction(
            *out.shape, *places, _WIDTHS[out.dtype], coefficient, 1 - coefficient, _RULES[rule], nesterov, commit
        )
        increment_version((momentum, out) if commit else out)
        return True

    def add_update(self, parameter: Tensor, update: Tensor, kept: float, step_size: float) -> bool:
        """``parameter <- kept parameter - step_size update`` of one region, in fp32.

        ``update`` may be in bf16.
        """
        if parameter.dtype != torch.float32 or update.dtype not in _WIDTHS:
            return False
        places = row_places(parameter, update)
        if places is None:
            return False
        self._library.apply(*parameter.shape, *places, _WIDTHS[update.dtype], kept, -step_size)
        increment_version(parameter)
        return True

    def transpose(self, target: Tensor, source: Tensor) -> bool:
        """``target <- source^T`` of one matrix of two-byte elements."""
        if target.dtype != source.dtype or target.dtype.itemsize != 2 or target.shape[::-1] != source.shape:
            return False
        source_place, target_place = row_places(source), row_places(target)
        if source_place is None or target_place is None or (target.numel() and source_place[0] == target_place[0]):
            return False
        self._library.transpose(*source.shape, *source_place, *target_place)
        increment_version(target)
        return True

    def adamw(self, shards: AdamWShards, coefficients: AdamWCoefficients) -> AdamWShards:
        """:func:`~omn_dist.algorithms.adamw.adamw`, batch-invariant, of contiguous shards in fp32.

        Returns:
            The shards that it did not take.
        """
        block = torch.empty(BLOCK_ELEMENTS, dtype=torch.float32, device="cpu")
        if type(block) is not Tensor:
            # A mode of this thread makes tensors that have no memory.
            return shards
        found = [_adamw_addresses(*tensors) for tensors in zip(*shards[:4], strict=True)]
        taken = _selected(shards, [places is not None for places in found])
        if taken.steps:
            torch._foreach_add_(taken.steps, 1)
            by_step: dict[float, list[_Shard]] = {}
            described = [_Shard(*places) for places in found if places is not None]
            for shard, step in zip(described, torch.stack(taken.steps).tolist(), strict=True):
                by_step.setdefault(step, []).append(shard)
            for step, together in by_step.items():
                self._step(together, _AdamW.of(coefficients, step), block)
            increment_version([*taken.parameters, *taken.first_moments, *taken.second_moments])
        return _selected(shards, [places is None for places in found])

    def _step(self, shards: "list[_Shard]", numbers: "_AdamW", block: Tensor) -> None:
        """Move all shards, as one row of elements, block after block.

        The root is torch's own operation, since its vector library does not round roots correctly.
        On samples the root of a number does not depend on its place in a tensor.
        """
        row = (_Shard * len(shards))(*shards)
        num_left = sum(shard.num_elements for shard in shards)
        of_moments, of_update = (_Position(ctypes.addressof(row), 0) for _ in range(2))
        address = block.data_ptr()
        while num_left:
            count = min(block.numel(), num_left)
            if count < block.numel():
                block = block[:count]
            self._library.adamw_moments(ctypes.byref(of_moments), count, address, ctypes.byref(numbers))
            torch.sqrt(block, out=block)
            self._library.adamw_update(ctypes.byref(of_update), count, address, ctypes.byref(numbers))
            num_left -= count


class _Shard(ctypes.Structure):
    _fields_ = [
        ("num_elements", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("parameter", "first", "second", "gradient")),
    ]

    num_elements: int


class _Position(ctypes.Structure):
    _fields_ = [("shard", ctypes.c_void_p), ("element", ctypes.c_long)]


class _AdamW(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_float)
        for name in ("kept", "first_weight", "second_coefficient", "second_weight", "correction", "eps", "step_size")
    ]

    @classmethod
    def of(cls, coefficients: AdamWCoefficients, step: float) -> "_AdamW":
        """The numbers of step number ``step``, made in double as torch makes them."""
        lr, (first, second) = coefficients.lr, coefficients.betas
        return cls(
            1 - lr * coefficients.weight_decay,
            1 - first,
            second,
            1 - second,
            (1 - second**step) ** 0.5,
            coefficients.eps,
            -(lr / (1 - first**step)),
        )


def _adamw_addresses(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> tuple[int, ...] | None:
    """The fields of a :class:`_Shard`, or ``None``."""
    if not parameter.dtype == gradient.dtype == first.dtype == second.dtype == torch.float32:
        return None
    found = addresses(parameter, first, second, gradient)
    return None if found is None else (parameter.numel(), *found)


def _selected(shards: AdamWShards, chosen: list[bool]) -> AdamWShards:
    return AdamWShards(*(list(compress(tensors, chosen)) for tensors in shards))
