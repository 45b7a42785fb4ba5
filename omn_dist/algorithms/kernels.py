"""Parts of a step on CPU shards in one pass over memory each, with the bits of torch's operations.

Torch reads and writes memory once for every operation; these kernels (kernels.c, built when the package is installed, where there
is a C compiler) do so once for all of them. Nothing needs them: what they do not take, torch does, to the same bits. (The sign of a
zero is that of torch's vector loops; their scalar tails differ from them in it, see docs/numerics.md.)
"""

import ctypes
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw as torch_adamw

from omn_dist.algorithms.momentum import MomentumRule, direction, next_momentum

_LIBRARY = "omn_dist.algorithms._kernels"
_VECTORS = ("AVX2", "AVX512")
"""CPU capabilities for which torch fuses multiply-adds, and the kernels with it."""
_RULES: dict[MomentumRule, int] = {"sum": 0, "ema": 1}
_NUM_ROOTS = 3
_WIDTHS = {torch.float32: 0, torch.bfloat16: 1}


def takes(*tensors: Tensor, narrow: Tensor | None = None) -> bool:
    """Whether the kernels take these tensors: fp32 on the CPU, flat or ``[rows, columns]`` with a row's elements side by side.

    ``narrow`` may also be in bf16. With several threads torch's operations are left alone: the kernels have one.
    """
    return (
        torch.get_num_threads() == 1
        and all(tensor.dtype == torch.float32 and in_memory(tensor) and tensor.stride(-1) == 1 for tensor in tensors)
        and (narrow is None or (narrow.dtype in _WIDTHS and in_memory(narrow) and narrow.stride(-1) == 1))
        and usable()
    )


def takes_adamw(*tensors: Tensor) -> bool:
    """Whether :func:`adamw` takes these tensors: contiguous, fp32, on a CPU with AVX-512."""
    return (
        all(tensor.dtype == torch.float32 and in_memory(tensor) and tensor.is_contiguous() for tensor in tensors)
        and torch.get_num_threads() == 1
        and adamw_usable()
    )


def takes_transposed(target: Tensor, source: Tensor) -> bool:
    """Whether :func:`transpose` takes these: ``[rows, columns]`` of two-byte elements on the CPU, those of a row side by side."""
    return (
        torch.get_num_threads() == 1
        and target.dtype == source.dtype
        and target.dtype.itemsize == 2
        and all(t.ndim == 2 and in_memory(t) and t.stride(1) == 1 for t in (target, source))
        and usable()
    )


def in_memory(tensor: Tensor) -> bool:
    """Whether the elements lie in this process's memory now: a plain tensor on the CPU, not fake, a wrapper or in a trace."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def write_direction(
    out: Tensor, gradient: Tensor, momentum: Tensor, coefficient: float, rule: MomentumRule, nesterov: bool, *, commit: bool
) -> None:
    """The direction of ``gradient`` and ``momentum`` to ``out`` (the ``narrow`` of :func:`takes`), all ``[rows, columns]``.

    As :func:`~omn_dist.algorithms.momentum.next_momentum` and :func:`~omn_dist.algorithms.momentum.direction`; with ``commit``
    the momentum becomes that of this step.
    """
    places = [number for tensor in (gradient, momentum, out) for number in (tensor.data_ptr(), tensor.stride(0))]
    library().omn_direction(*out.shape, *places, _WIDTHS[out.dtype], coefficient, 1 - coefficient, _RULES[rule], nesterov, commit)
    increment_version((momentum, out) if commit else out)


def add_update(parameter: Tensor, update: Tensor, kept: float, step_size: float) -> None:
    """``parameter <- kept parameter + step_size update``, both ``[rows, columns]``; ``update`` as ``narrow`` in :func:`takes`."""
    places = [number for tensor in (parameter, update) for number in (tensor.data_ptr(), tensor.stride(0))]
    library().omn_apply(*parameter.shape, *places, _WIDTHS[update.dtype], kept, step_size)
    increment_version(parameter)


def adamw(
    shards: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: float,
    root: int | None = None,
) -> None:
    """Step number ``step`` of ``torch.optim.AdamW(foreach=False, fused=False)`` on shards, in place.

    A shard is parameter, gradient, first and second moment of one shape, which :func:`takes_adamw`. The root is torch's, unless
    ``root`` names another one.
    """
    described = (_Shard * len(shards))()
    for place, (parameter, gradient, first, second) in zip(described, shards, strict=True):
        place.num_elements, place.gradient = parameter.numel(), gradient.data_ptr()
        place.parameter, place.first, place.second = parameter.data_ptr(), first.data_ptr(), second.data_ptr()
    by = _AdamW(
        1 - lr * weight_decay,
        1 - betas[0],
        betas[1],
        1 - betas[1],
        (1 - betas[1] ** step) ** 0.5,
        eps,
        -(lr / (1 - betas[0] ** step)),
    )
    library().omn_adamw(described, len(shards), ctypes.byref(by), _adamw_root() if root is None else root)
    increment_version([tensor for parameter, _, first, second in shards for tensor in (parameter, first, second)])


class _Shard(ctypes.Structure):
    _fields_ = [
        ("num_elements", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("parameter", "first", "second", "gradient")),
    ]


class _AdamW(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_float)
        for name in ("kept", "first_weight", "second_coefficient", "second_weight", "correction", "epsilon", "step_size")
    ]


def transpose(target: Tensor, source: Tensor) -> None:
    """``target <- source^T``, matrices that :func:`takes_transposed`."""
    places = [number for tensor in (source, target) for number in (tensor.data_ptr(), tensor.stride(0))]
    library().omn_transpose(*source.shape, *places)
    increment_version(target)


@cache
def usable() -> bool:
    """Whether the kernels were built and give the bits of this torch on this machine, which is tried once."""
    spec = importlib.util.find_spec(_LIBRARY)
    return spec is not None and torch.backends.cpu.get_cpu_capability() in _VECTORS and _agree_with_torch()


def adamw_usable() -> bool:
    """Whether AdamW's kernel is there and gives the bits of this torch on this machine: it rebuilds the root of torch's library."""
    return _adamw_root() is not None


@cache
def _adamw_root() -> int | None:
    """Which of the kernel's roots (``enum root``) is torch's, which is tried once."""
    if not usable() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    return next((root for root in range(_NUM_ROOTS) if _adamw_agrees(root)), None)


@cache
def library() -> ctypes.CDLL:
    """The kernels as C functions, where :func:`usable` says that they are there."""
    spec = importlib.util.find_spec(_LIBRARY)
    assert spec is not None, "usable() comes first"
    assert spec.origin is not None, "a library is a file"
    kernels = ctypes.CDLL(spec.origin)
    size, address, real, number = ctypes.c_long, ctypes.c_void_p, ctypes.c_float, ctypes.c_int
    rectangle = (address, size)
    kernels.omn_direction.argtypes = [size, size, *rectangle, *rectangle, *rectangle, number, real, real, number, number, number]
    kernels.omn_apply.argtypes = [size, size, *rectangle, *rectangle, number, real, real]
    if hasattr(kernels, "omn_adamw"):
        kernels.omn_adamw.argtypes = [address, size, address, number]
    if hasattr(kernels, "omn_newton_schulz"):
        kernels.omn_newton_schulz.argtypes = [size, size, size, *(address for _ in range(8))]
        operands = (address, address, number, size)
        kernels.omn_product.argtypes = [size, size, size, *operands, address, address, real, real, address]
    kernels.omn_transpose.argtypes = [size, size, *rectangle, *rectangle]
    return kernels


@contextmanager
def torch_as_it_starts() -> Iterator[None]:
    """Torch's own defaults for the device and dtype of new tensors, whatever has been set: for trials, which make some."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@torch_as_it_starts()
def _agree_with_torch() -> bool:
    """Every kernel against the operations that it stands in for, on some thousand numbers of many magnitudes and an odd count."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 7, 203, generator=generator).mul_(torch.logspace(-6, 2, 203))
    # Directions half-way between two numbers of bf16.
    a[0], b[0] = (0x3F800000 + 0x8000 * torch.arange(203, dtype=torch.int32)).view(torch.float32), 0
    wide = torch.arange(300 * 137, dtype=torch.int16).view(300, 137)
    transposed = torch.zeros(137, 300, dtype=torch.int16)
    transpose(transposed, wide)
    return torch.equal(transposed, wide.T) and _directions_agree(a, b) and _updates_agree(a, b)


def _directions_agree(gradient: Tensor, momentum: Tensor) -> bool:
    ways = itertools.product(_RULES, (False, True), (False, True), _WIDTHS, (0.95, 0.3))
    for rule, nesterov, commit, dtype, coefficient in ways:
        updated = next_momentum(gradient, momentum, coefficient, rule)
        expected = direction(gradient, updated, coefficient, rule, nesterov).to(dtype)
        kept, out = momentum.clone(), torch.zeros_like(expected)
        write_direction(out, gradient, kept, coefficient, rule, nesterov, commit=commit)
        if not (torch.equal(out, expected) and torch.equal(kept, updated if commit else momentum)):
            return False
    return True


def _updates_agree(parameter: Tensor, update: Tensor) -> bool:
    for dtype in _WIDTHS:
        by, moved = update.to(dtype), parameter.clone()
        add_update(moved, by, 0.998, -0.013)
        if not torch.equal(moved, parameter.mul(0.998).add_(by, alpha=-0.013)):
            return False
    return True


@torch_as_it_starts()
def _adamw_agrees(root: int) -> bool:
    """Of second moments the whole range, zero and denormal numbers with it."""
    second_moment = torch.arange(0, 0x7F800000, 0x1FFF3, dtype=torch.int32).view(torch.float32)
    generator = torch.Generator().manual_seed(0)
    others = torch.randn(3, len(second_moment), generator=generator).mul_(torch.logspace(-9, 2, len(second_moment)))
    # Without a gradient the smallest ones stay small.
    others[1, ::2] = 0
    ours, theirs = ([tensor.clone() for tensor in (*others, second_moment)] for _ in range(2))
    adamw([(ours[0], ours[1], ours[2], ours[3])], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3.0, root=root)
    other, new, first, second = ([tensor] for tensor in theirs)
    torch_adamw(
        other,
        new,
        first,
        second,
        [],
        [torch.tensor(2.0)],
        foreach=False,
        fused=False,
        amsgrad=False,
        beta1=0.9,
        beta2=0.95,
        lr=3e-3,
        weight_decay=0.1,
        eps=1e-8,
        maximize=False,
    )
    return all(map(torch.equal, ours, theirs))
