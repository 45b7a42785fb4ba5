"""The shard-local parts of a step on many rectangles at a time, for devices where every operation is a kernel launch.

Each function takes lists, tensors of one rectangle at one index, and makes a fixed number of calls however long they are: torch's
multi-tensor operations, and where there is none (``torch.where``) one call on the elements of all rectangles in a row.
The formulas are those of :mod:`~omn_dist.algorithms.momentum` and :func:`omn_dist.algorithms.muon.apply`, with the same bits.
Nothing here is collective, and nothing waits for the device.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from omn_dist.algorithms.momentum import MOMENTUM_RULES, MomentumRule
from omn_dist.algorithms.muon import cautious_factors
from omn_dist.settings import unknown_name

Settings = TypeVar("Settings", bound=Hashable)


def uses_multi_tensor(device: torch.device) -> bool:
    """Whether rectangles on this device go together; on a CPU one by one is faster, since each then stays in the cache."""
    return device.type != "cpu"


def batches(rectangles: Iterable[tuple[Settings, Sequence[Tensor]]]) -> Iterator[tuple[Settings, list[list[Tensor]]]]:
    """Rectangles that one call may take, as one list for each of their tensors: of equal settings and alike in memory.

    torch takes lists in one launch when each has one dtype and all tensors are dense with the strides of their neighbours;
    otherwise it goes one by one. So rectangles with gaps between their rows are apart from those without.
    """
    found: dict[Hashable, tuple[Settings, list[Sequence[Tensor]]]] = {}
    for settings, tensors in rectangles:
        key = settings, all(tensor.is_contiguous() for tensor in tensors), *(tensor.dtype for tensor in tensors)
        found.setdefault(key, (settings, []))[1].append(tensors)
    for settings, together in found.values():
        yield settings, [list(tensors) for tensors in zip(*together, strict=True)]


def prepare(
    gradients: list[Tensor],
    momenta: list[Tensor],
    out: list[Tensor],
    coefficient: float,
    rule: MomentumRule,
    nesterov: bool,
    *,
    commit: bool,
) -> None:
    """Gradients and momenta to directions, written to ``out`` in its dtype; ``commit`` makes the momenta those of this step."""
    gradients = _widened(gradients, momenta[0].dtype)
    updated = momenta if commit else _copies(momenta, momenta[0].dtype)
    update_momenta(gradients, updated, coefficient, rule)
    torch._foreach_copy_(out, directions(gradients, updated, coefficient, rule) if nesterov else updated)


def update_momenta(gradients: list[Tensor], momenta: list[Tensor], coefficient: float, rule: MomentumRule) -> None:
    """The momenta after these gradients, in place: :func:`~omn_dist.algorithms.momentum.next_momentum` on lists."""
    dtype = momenta[0].dtype
    if rule == "sum":
        if dtype.itemsize < 4:
            # In place, where torch goes one by one, it rounds the coefficient to the dtype of the tensors.
            torch._foreach_copy_(momenta, torch._foreach_mul(momenta, coefficient))
        else:
            torch._foreach_mul_(momenta, coefficient)
        # In a narrower dtype the sum is rounded, not the gradient; torch does that one by one.
        torch._foreach_add_(momenta, _widened(gradients, dtype))
    elif rule == "ema":
        torch._foreach_lerp_(momenta, _in_dtype(gradients, dtype), 1 - coefficient)
    else:
        raise ValueError(unknown_name("momentum rule", rule, MOMENTUM_RULES))


def directions(gradients: list[Tensor], updated: list[Tensor], coefficient: float, rule: MomentumRule) -> list[Tensor]:
    """Nesterov's directions in the dtype of ``updated``: :func:`~omn_dist.algorithms.momentum.direction` on lists."""
    dtype = updated[0].dtype
    gradients = _in_dtype(gradients, dtype)
    if rule == "sum":
        single = _in_dtype(gradients, torch.float32), _in_dtype(updated, torch.float32)
        return _in_dtype(list(torch._foreach_add(*single, alpha=coefficient)), dtype)
    return list(torch._foreach_lerp(gradients, updated, coefficient))


def apply(parameters: list[Tensor], updates: list[Tensor], kept: float, step_size: float, *, cautious: bool) -> None:
    """Move parameters by their updates, in place; ``kept`` and ``step_size`` of :func:`omn_dist.algorithms.muon.move`."""
    precise = torch.promote_types(parameters[0].dtype, torch.float32)
    weights, updates = _in_dtype(parameters, precise), _in_dtype(updates, precise)
    if cautious and kept != 1:
        factors = cautious_factors(in_a_row(list(torch._foreach_mul(weights, updates))), kept)
        torch._foreach_mul_(weights, _cut(factors, weights))
    elif kept != 1:
        torch._foreach_mul_(weights, kept)
    torch._foreach_add_(weights, updates, alpha=-step_size)
    if weights is not parameters:
        torch._foreach_copy_(parameters, weights)


def in_a_row(tensors: list[Tensor]) -> Tensor:
    """A copy of the elements of all tensors, which have one dtype: ``[elements]``."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def restore_absent(tensors: list[Tensor], present: list[Tensor], before: Tensor) -> None:
    """Give back what :func:`in_a_row` kept of ``tensors`` to those whose ``present``, a scalar each, is zero."""
    chosen = torch.cat([flag.expand(tensor.numel()) for flag, tensor in zip(present, tensors, strict=True)]) > 0
    torch._foreach_copy_(tensors, _cut(torch.where(chosen, in_a_row(tensors), before), tensors))


def _cut(row: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The elements of tensors in a row as views of their shapes."""
    parts = torch.split(row, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _in_dtype(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors, which have one dtype, in another one; the same list where it is theirs."""
    return tensors if tensors[0].dtype == dtype else _copies(tensors, dtype)


def _widened(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """As :func:`_in_dtype` where that rounds nothing, else the tensors themselves."""
    return _in_dtype(tensors, dtype) if torch.promote_types(tensors[0].dtype, dtype) == dtype else tensors


def _copies(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    found = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(found, tensors)
    return found
