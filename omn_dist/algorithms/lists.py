"""Lists of tensors that one formula takes together, and the row blocks that it takes on a CPU.

The formulas of a step take lists, with the tensors of one region at one index.

On a GPU every operation is a kernel launch. So whole lists go through torch's multi-tensor
operations, and the number of launches does not grow with the lists. (They are ``torch._foreach_*``;
torch has no other name for them.) On a CPU the traffic to memory counts. So each block of rows goes
through the whole formula while it is in the cache.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Settings = TypeVar("Settings", bound=Hashable)

_BLOCK_ELEMENTS = 2**17
"""Elements of a block on a CPU. Three blocks in fp32 stay in a core's cache of 2 MiB, and smaller
ones cost more calls (12.6 million elements took 25 ms, and 28 ms with a quarter of this)."""


def uses_multi_tensor(device: torch.device) -> bool:
    """Whether formulas take whole lists on this device, not block after block."""
    return device.type != "cpu"


def batches(regions: Sequence[tuple[Settings, Sequence[Tensor]]]) -> Iterator[tuple[Settings, list[list[Tensor]]]]:
    """Group regions that one call may take, as one list for each of their tensors.

    torch takes lists in one launch when each list has one dtype and all tensors are dense. So
    regions of a group have equal settings and dtypes, and those with gaps between their rows are
    apart.

    Args:
        regions: settings and tensors of each region.
    """
    if len(regions) == 1:
        # On a CPU, where every region goes alone, the key would cost more than the call.
        ((settings, tensors),) = regions
        yield settings, [[tensor] for tensor in tensors]
        return
    found: dict[Hashable, tuple[Settings, list[Sequence[Tensor]]]] = {}
    for settings, tensors in regions:
        key = settings, all(tensor.is_contiguous() for tensor in tensors), *(tensor.dtype for tensor in tensors)
        found.setdefault(key, (settings, []))[1].append(tensors)
    for settings, together in found.values():
        yield settings, [list(tensors) for tensors in zip(*together, strict=True)]


def blocks(*lists: list[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """The lists as a formula takes them: whole, or on a CPU lists of one block of rows each.

    Args:
        lists: of equal length, with tensors of one shape ``[rows, columns]`` at one index.
    """
    if not lists[0]:
        return
    if uses_multi_tensor(lists[0][0].device):
        yield lists
        return
    for tensors in zip(*lists, strict=True):
        num_rows, num_columns = tensors[0].shape
        rows_a_block = max(1, _BLOCK_ELEMENTS // max(1, num_columns))
        if num_rows <= rows_a_block:
            yield tuple([tensor] for tensor in tensors)
        else:
            for parts in zip(*(tensor.split(rows_a_block) for tensor in tensors), strict=True):
                yield tuple([part] for part in parts)


def in_a_row(tensors: list[Tensor]) -> Tensor:
    """A copy of the elements of all tensors, which have one dtype: ``[elements]``."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def in_one_call(function: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """An elementwise function that has no multi-tensor form, of all tensors in one call."""
    return [function(tensors[0])] if len(tensors) == 1 else _cut(function(in_a_row(tensors)), tensors)


def restore_absent(tensors: list[Tensor], present: list[Tensor], before: Tensor) -> None:
    """Undo what happened to tensors whose ``present``, a scalar each, is zero.

    Args:
        tensors: of one dtype; changed in place.
        present: on their device, which the host does not wait for.
        before: what :func:`in_a_row` copied of the tensors.
    """
    chosen = torch.cat([flag.expand(tensor.numel()) for flag, tensor in zip(present, tensors, strict=True)]) > 0
    torch._foreach_copy_(tensors, _cut(torch.where(chosen, in_a_row(tensors), before), tensors))


def _cut(row: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of a row of elements, in the shapes of ``like``."""
    parts = torch.split(row, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def in_dtype(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors, which have one dtype, in another one; the same list where it is theirs."""
    return tensors if tensors[0].dtype == dtype else copies(tensors, dtype)


def widened(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors in another dtype where that rounds nothing, else the same list."""
    return in_dtype(tensors, dtype) if torch.promote_types(tensors[0].dtype, dtype) == dtype else tensors


def copies(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """New tensors with the same elements in this dtype."""
    found = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(found, tensors)
    return found
