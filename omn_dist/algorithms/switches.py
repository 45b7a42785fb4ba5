"""torch's global switches of matrix products, set aside while the optimizer computes.

A program sets them for its model: ``torch.set_float32_matmul_precision("medium")``,
``torch.backends.cuda.matmul.allow_tf32`` and others. They would change the bits of a step.
"""

import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from typing import Any, Self

import torch


@dataclass(frozen=True)
class _Switch:
    """A switch that all threads of a process share."""

    read: Callable[[], Any]
    ours: tuple[Any, ...]
    """Values under which the optimizer computes: torch's default, and others with its effect."""
    set_aside: Callable[[Any], None]
    """Writes one of ours, given what ``read`` returned."""
    restore: Callable[[Any], None]
    """Writes what ``read`` returned."""


def _cpu_precision() -> _Switch:
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # not in its stubs

    def write(value: str) -> None:
        matmul.fp32_precision = value

    return _Switch(
        lambda: matmul.fp32_precision, ("none", "ieee"), lambda _: write("ieee"), lambda found: _inherit_or_set(matmul, found)
    )


def _inherit_or_set(matmul: Any, precision: str) -> None:
    # What is read may come from torch.backends.fp32_precision. With "none" it does again, and
    # later changes there have an effect.
    matmul.fp32_precision = "none"
    if matmul.fp32_precision != precision:
        matmul.fp32_precision = precision


def _cuda_precision() -> _Switch:
    """TF32, which has two interfaces in torch; its profiler raises where they disagree."""
    cpu: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # not in its stubs
    cuda = torch.backends.cuda.matmul

    def older() -> str | None:
        try:
            return torch.get_float32_matmul_precision() if cuda.allow_tf32 else None
        except RuntimeError:
            # The program used the newer interface, and torch refuses to read the older one.
            return None

    def read() -> Any:
        precision = cuda.fp32_precision
        return (precision, older()) if precision == "tf32" else precision

    def set_aside(found: tuple[str, str | None]) -> None:
        if found[1] is None:
            cuda.fp32_precision = "ieee"
        else:
            cuda.allow_tf32 = False

    def restore(found: tuple[str, str | None]) -> None:
        if found[1] is None:
            _inherit_or_set(cuda, found[0])
            return
        of_cpu = cpu.fp32_precision
        torch.set_float32_matmul_precision(found[1])
        if cpu.fp32_precision != of_cpu:
            _inherit_or_set(cpu, of_cpu)

    return _Switch(read, ("none", "ieee"), set_aside, restore)


def _mkldnn() -> _Switch:
    """Whether oneDNN multiplies, as torch does by default where it was built with it."""

    def write(value: bool) -> None:
        # Unlike the attribute, this may be set after torch.backends.disable_global_flags().
        torch.backends.mkldnn.set_flags(_enabled=value, _fp32_precision=None)  # type: ignore[no-untyped-call]

    return _Switch(lambda: torch.backends.mkldnn.enabled, (True,), lambda _: write(True), write)


def _fp16_accumulation() -> _Switch:
    def write(value: bool) -> None:
        torch.backends.cuda.matmul.allow_fp16_accumulation = value

    return _Switch(lambda: torch.backends.cuda.matmul.allow_fp16_accumulation, (False,), lambda _: write(False), write)


def _reduction(dtype: str) -> _Switch:
    """Sums of cuBLAS in half precision, and whether it may split the depth."""
    matmul, name = torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction"

    def write(value: tuple[bool, bool]) -> None:
        # torch 2.9 has no second switch.
        setattr(matmul, name, value[0] if value[1] else value)

    return _Switch(
        lambda: (getattr(matmul, name), getattr(matmul, f"{name}_split_k", True)),
        ((True, True),),
        lambda _: write((True, True)),
        write,
    )


def _switches() -> tuple[_Switch, ...]:
    found = [_cpu_precision(), _mkldnn()]
    if torch.version.cuda or torch.version.hip:
        found += [_cuda_precision(), _reduction("bf16"), _reduction("fp16"), _fp16_accumulation()]
    return tuple(found)


class DefaultProducts(ContextDecorator):
    """A context, or decorator, in which matrix products have the bits of torch's defaults.

    The switches belong to all threads. The first thread that enters sets them aside and the last
    one that leaves restores them; threads that compute other things meanwhile see torch's defaults
    too. What a program sets meanwhile stays. Where every switch is at its default, nothing is
    written.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._set_aside: dict[int, Any] = {}
        """What was found, by the number of the switch."""
        self._switches: tuple[_Switch, ...] = ()

    def __enter__(self) -> Self:
        with self._lock:
            self._switches = self._switches or _switches()
            for number, switch in enumerate(self._switches):
                found = switch.read()
                if found not in switch.ours:
                    switch.set_aside(found)
                    self._set_aside[number] = found
            self._num_inside += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside or not self._set_aside:
                return
            for number, found in self._set_aside.items():
                switch = self._switches[number]
                if switch.read() in switch.ours:
                    switch.restore(found)
            self._set_aside = {}


default_products = DefaultProducts()
"""The one of this process."""
