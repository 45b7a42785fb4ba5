"""The operations of a step that may have faster implementations, here with torch."""

from collections.abc import Iterable

import torch
from torch import Tensor

from omn_dist.algorithms.adamw import AdamWCoefficients, AdamWShards, adamw
from omn_dist.algorithms.iteration import IterationKernels
from omn_dist.algorithms.momentum import MomentumRule, write_directions
from omn_dist.algorithms.updates import apply_updates


class Kernels(IterationKernels):
    """The operations of a step by torch, which takes every tensor on every device.

    A subclass overrides what it has faster implementations of. It looks at the tensors of each
    call, and calls ``super()`` for those that it cannot take, so results never depend on which
    kernels run.

    Nothing here is collective.
    """

    name = "torch"
    """For messages."""
    fuses_adamw = False
    """Whether AdamW makes few passes over a CPU shard, not one for each of torch's operations."""

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
        """:func:`~omn_dist.algorithms.momentum.write_directions`."""
        write_directions(gradients, momenta, out, coefficient, rule, nesterov, commit=commit)

    def apply_updates(
        self, parameters: list[Tensor], updates: list[Tensor], kept: float, step_size: float, *, cautious: bool
    ) -> None:
        """:func:`~omn_dist.algorithms.updates.apply_updates`."""
        apply_updates(parameters, updates, kept, step_size, cautious=cautious)

    def adamw(self, shards: AdamWShards, coefficients: AdamWCoefficients, *, batch_invariant: bool) -> None:
        """:func:`~omn_dist.algorithms.adamw.adamw`."""
        adamw(shards, coefficients, batch_invariant=batch_invariant)

    def warm_up(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> None:
        """Try matrices of these shapes before the first step, so that no step tries anything.

        Torch needs no trial.

        Args:
            shapes: rows and columns of the matrices that this rank will orthogonalise.
            dtype: that of the iteration.
        """


TORCH = Kernels()
"""Everything by torch."""
