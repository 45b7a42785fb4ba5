"""The library of C functions: whether it is there, and what this CPU can run of it."""

import ctypes
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from omn_dist.settings import SettingsError, unknown_name

FLAGS_VARIABLE = "OMN_DIST_CPU_FLAGS"
"""Environment variable for tests: a comma list of features. Others count as masked."""
FEATURES = {"avx2": 1, "avx512": 2, "avx512_bf16": 4}
"""By name, their bits in features.c: AVX2 with FMA; AVX-512 F, BW, DQ and VL; AVX512_BF16."""
_AMX = 8

_LIBRARY = "omn_dist.kernels.cpu._kernels"
_FUSING = ("AVX2", "AVX512")
"""Capabilities with which torch's own kernels fuse multiply-adds, as these do."""

Function = Callable[..., None]


class NoKernelsError(Exception):
    """Why the C kernels cannot run here."""


class Library(NamedTuple):
    """C functions, in the variant for this CPU; the .c files say what they do."""

    variant: str
    direction: Function
    apply: Function
    transpose: Function
    adamw_moments: Function
    adamw_update: Function
    newton_schulz: Function | None
    """With AVX512_BF16 and without AMX, which torch would use instead; so is :attr:`product`."""
    product: Function | None


def load_library(flags: str | None = None) -> Library:
    """The functions for this CPU.

    Args:
        flags: what ``OMN_DIST_CPU_FLAGS`` says; ``None``: every feature of the CPU counts.

    Raises:
        NoKernelsError: the library was not built, is of another version, or is not for this CPU.
        SettingsError: an unknown flag.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _FUSING:
        raise NoKernelsError(f"torch's own kernels are of CPU capability {capability} and fuse no multiply-adds")
    spec = importlib.util.find_spec(_LIBRARY)
    if spec is None or spec.origin is None:
        raise NoKernelsError("the library was not built; it takes a C compiler when the package is installed")
    try:
        built = ctypes.CDLL(spec.origin)
        features = _features(built, flags)
        variant = next((name for name in ("avx512", "avx2") if name in features), None)
        if variant is None:
            raise NoKernelsError(f"the CPU lacks AVX2 and FMA{_masked(flags)}")
        return _functions(built, variant, has_products="avx512_bf16" in features and "amx" not in features)
    except (AttributeError, OSError) as error:
        raise NoKernelsError(f"the library is not that of this version, reinstall the package: {error}") from error


def _features(built: ctypes.CDLL, flags: str | None) -> set[str]:
    bits = built.omn_cpu_features()
    found = {name for name, bit in FEATURES.items() if bits & bit}
    if flags is not None:
        named = {name for name in flags.split(",") if name}
        for name in named - FEATURES.keys():
            raise SettingsError(unknown_name(FLAGS_VARIABLE, name, FEATURES))
        found &= named
    return found | ({"amx"} if bits & _AMX else set())


def _masked(flags: str | None) -> str:
    return "" if flags is None else f", as {FLAGS_VARIABLE}={flags!r} has it"


def _functions(built: ctypes.CDLL, variant: str, *, has_products: bool) -> Library:
    size, address, real, number = ctypes.c_long, ctypes.c_void_p, ctypes.c_float, ctypes.c_int
    matrix = (address, size)

    def function(name: str, *arguments: type) -> Function:
        found: Any = getattr(built, f"omn_{name}")
        found.argtypes, found.restype = arguments, None
        return cast(Function, found)

    operands = (address, address, number, size)
    return Library(
        variant,
        function(f"direction_{variant}", size, size, *matrix * 3, number, real, real, number, number, number),
        function(f"apply_{variant}", size, size, *matrix * 2, number, real, real),
        function(f"transpose_{variant}", size, size, *matrix * 2),
        function(f"adamw_moments_{variant}", address, size, address, address),
        function(f"adamw_update_{variant}", address, size, address, address),
        function("newton_schulz", size, size, size, *(address,) * 8) if has_products else None,
        function("product", size, size, size, *operands, address, address, real, real, address) if has_products else None,
    )
