"""The C kernels behind the interface of a step's operations."""

from collections.abc import Iterable

import torch
from torch import Tensor
from typing_extensions import override

from omn_dist.algorithms import lists
from omn_dist.algorithms.adamw import AdamWCoefficients, AdamWShards
from omn_dist.algorithms.coefficients import Schedule
from omn_dist.algorithms.momentum import MomentumRule
from omn_dist.algorithms.scratch import Scratch
from omn_dist.kernels.base import Kernels
from omn_dist.kernels.cpu.elementwise import Elementwise
from omn_dist.kernels.cpu.library import Library, NoKernelsError, load_library
from omn_dist.kernels.cpu.memory import may_run
from omn_dist.kernels.cpu.products import Products
from omn_dist.kernels.cpu.samples import COMPARISONS
from omn_dist.kernels.cpu.trial import in_own_thread


class CpuKernels(Kernels):
    """C functions for plain CPU tensors in a process with one thread; torch for the rest.

    Args:
        library: the C functions.
        operations: those of ``COMPARISONS`` whose samples had torch's bits. Torch does the others.
    """

    def __init__(self, library: Library, operations: frozenset[str]) -> None:
        self.name = f"C for {library.variant}"
        self.fuses_adamw = "AdamW" in operations
        self._operations = operations
        self._elementwise = Elementwise(library)
        self._products: Products | None = None
        if library.newton_schulz is not None and library.product is not None:
            self._products = Products(library.newton_schulz, library.product)

    def __str__(self) -> str:
        listed = ", ".join(name for name in COMPARISONS if name in self._operations)
        differing = ", ".join(name for name in COMPARISONS if name not in self._operations)
        return (
            f"{self.name} ({listed}, with torch's bits on samples"
            + (", and bf16 Newton-Schulz on shapes with torch's bits" if self._products else "")
            + (f"; torch for {differing}, whose samples differed)" if differing else ")")
        )

    @override
    def write_directions(
        self,
        gradients: list[Tensor],
        momenta: list[Tensor],
        out: list[Tensor],
        coefficient: float,
        rule: MomentumRule,
        nesterov: bool,
        *,
        commit: bool,
    ) -> None:
        if not self._may_take("directions", momenta):
            super().write_directions(gradients, momenta, out, coefficient, rule, nesterov, commit=commit)
            return
        for gradient, momentum, target in zip(gradients, momenta, out, strict=True):
            if not self._elementwise.write_direction(gradient, momentum, target, coefficient, rule, nesterov, commit=commit):
                super().write_directions([gradient], [momentum], [target], coefficient, rule, nesterov, commit=commit)

    @override
    def apply_updates(
        self, parameters: list[Tensor], updates: list[Tensor], kept: float, step_size: float, *, cautious: bool
    ) -> None:
        if cautious or not self._may_take("updates", parameters):
            super().apply_updates(parameters, updates, kept, step_size, cautious=cautious)
            return
        for parameter, update in zip(parameters, updates, strict=True):
            if not self._elementwise.add_update(parameter, update, kept, step_size):
                super().apply_updates([parameter], [update], kept, step_size, cautious=cautious)

    @override
    def adamw(self, shards: AdamWShards, coefficients: AdamWCoefficients, *, batch_invariant: bool) -> None:
        if batch_invariant and self._may_take("AdamW", shards.parameters):
            shards = self._elementwise.adamw(shards, coefficients)
        super().adamw(shards, coefficients, batch_invariant=batch_invariant)

    @override
    def newton_schulz(self, iterate: Tensor, schedule: Schedule, scratch: Scratch, out: Tensor | None = None) -> Tensor:
        found = None
        if self._products is not None:
            found = self._products.newton_schulz(iterate, schedule, scratch, out, self.copy_transposed)
        return super().newton_schulz(iterate, schedule, scratch, out) if found is None else found

    @override
    def copy_transposed(self, target: Tensor, source: Tensor) -> Tensor:
        if self._may_take("transposes", [target]) and self._elementwise.transpose(target, source):
            return target
        return super().copy_transposed(target, source)

    @override
    def warm_up(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> None:
        if self._products is not None and dtype == torch.bfloat16:
            self._products.warm_up(shapes)

    def _may_take(self, operation: str, tensors: list[Tensor]) -> bool:
        return operation in self._operations and bool(tensors) and not lists.uses_multi_tensor(tensors[0].device) and may_run()


def build_cpu_kernels(flags: str | None = None) -> CpuKernels:
    """The C kernels for this CPU, compared with torch on samples.

    Args:
        flags: what ``OMN_DIST_CPU_FLAGS`` says.

    Raises:
        NoKernelsError: they cannot run here, or all samples differed.
        SettingsError: an unknown flag.
    """
    library = load_library(flags)
    operations = agreeing(library)
    if not operations:
        raise NoKernelsError("all samples differed from torch's")
    return CpuKernels(library, operations)


def agreeing(library: Library) -> frozenset[str]:
    """The operations of ``COMPARISONS`` whose samples have torch's bits."""
    kernels = Elementwise(library)
    return in_own_thread(lambda: frozenset(name for name, agrees in COMPARISONS.items() if agrees(kernels)))
