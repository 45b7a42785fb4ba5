"""Which tensors C functions may take. All that they rely on is checked here, at every call."""

import torch
from torch import Tensor


def may_run() -> bool:
    """Whether the kernels may run now: in one thread, and not in a graph of the compiler."""
    return torch.get_num_threads() == 1 and not torch.compiler.is_compiling()


def row_places(*tensors: Tensor) -> list[int] | None:
    """Address and row stride (in elements) of each matrix, in a row.

    ``None`` where C cannot take them. It takes plain CPU tensors of one shape ``[rows, columns]``
    with the elements of a row side by side, rows that do not overlap, and no two at one address.
    """
    shape = tensors[0].shape
    if len(shape) != 2:
        return None
    num_rows, num_columns = shape
    is_empty = num_rows * num_columns == 0
    places: list[int] = []
    for tensor in tensors:
        if not _is_plain(tensor) or tensor.shape != shape:
            return None
        stride, step = tensor.stride()
        end = 0 if is_empty else (num_rows - 1) * stride + num_columns
        if step != 1 or (stride < num_columns and num_rows > 1) or not _is_there(tensor, end):
            return None
        places += (tensor.data_ptr(), stride)
    return places if is_empty or len(set(places[::2])) == len(tensors) else None


def addresses(*tensors: Tensor) -> list[int] | None:
    """Addresses of contiguous tensors of one shape; ``None`` as in :func:`row_places`."""
    shape, num_elements = tensors[0].shape, tensors[0].numel()
    found: list[int] = []
    for tensor in tensors:
        if not _is_plain(tensor) or tensor.shape != shape or not tensor.is_contiguous() or not _is_there(tensor, num_elements):
            return None
        found.append(tensor.data_ptr())
    return found if num_elements == 0 or len(set(found)) == len(found) else None


def _is_plain(tensor: Tensor) -> bool:
    """Whether the elements are in memory as they are: no wrapper, no fake, no lazy sign."""
    return type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_neg()


def _is_there(tensor: Tensor, num_elements: int) -> bool:
    """Whether so many elements are in the storage, which may have been resized since."""
    end = (tensor.storage_offset() + num_elements) * tensor.itemsize
    return num_elements == 0 or tensor.untyped_storage().nbytes() >= end
