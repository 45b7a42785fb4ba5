"""Muon on the path of a step: prepare (shards), transform (owner), apply (shards)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from omn_dist.algorithms import kernels
from omn_dist.algorithms.guards import capped, guarded
from omn_dist.algorithms.momentum import MomentumRule, direction, next_momentum
from omn_dist.algorithms.newton_schulz import Recipe, orthogonalize_into
from omn_dist.algorithms.scale import ScaleMode, adjusted_lr
from omn_dist.algorithms.scratch import Scratch

_BLOCK_ELEMENTS = 2**17
"""Elementwise work on CPU goes in blocks of so many elements: three of them in fp32 stay in a core's cache of 2 MiB, and smaller
ones cost more calls (measured with 12.6 million elements: 25 ms, 28 ms with a quarter)."""
_CPU_BATCH_BYTES, _BATCH_BYTES = 2**20, 2**26
"""Working memory of one batched call. On CPU what a core's cache holds: larger batches brought nothing there."""


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """What one group says of the shard-local parts of a step."""

    lr: float
    weight_decay: float
    momentum: float
    momentum_rule: MomentumRule
    nesterov: bool
    scale: ScaleMode
    cautious_decay: bool = False


@dataclass(frozen=True, kw_only=True)
class MuonSettings(UpdateSettings):
    """What one group says of its matrices at this step."""

    recipe: Recipe
    spectral_cap: float | None = None
    stable_rank_floor: float | None = None


def prepare(gradient: Tensor, momentum: Tensor, settings: UpdateSettings, out: Tensor, *, commit: bool, scratch: Scratch) -> None:
    """Gradient and momentum of a rectangle ``[rows, columns]`` to its direction, written to ``out`` in the wire dtype.

    Elementwise. ``commit`` makes the momentum that of this step, in place; else it is not changed. The gradient never is.
    """
    if kernels.takes(gradient, momentum, narrow=out):
        rule = settings.momentum_rule
        kernels.write_direction(out, gradient, momentum, settings.momentum, rule, settings.nesterov, commit=commit)
        return
    for gradients, momenta, target in _blocks(gradient, momentum, out):
        part = scratch.take("direction", momenta.shape, momenta.dtype, momenta.device)
        updated = next_momentum(gradients, momenta, settings.momentum, settings.momentum_rule, out=momenta if commit else part)
        target.copy_(direction(gradients, updated, settings.momentum, settings.momentum_rule, settings.nesterov, out=part))


def commit(gradient: Tensor, momentum: Tensor, settings: UpdateSettings) -> None:
    """The momentum of this step, in place, where :func:`prepare` left it alone."""
    for gradients, momenta in _blocks(gradient, momentum):
        next_momentum(gradients, momenta, settings.momentum, settings.momentum_rule, out=momenta)


def transform(directions: Tensor, settings: MuonSettings, *, deterministic: bool, scratch: Scratch) -> None:
    """Whole directions ``[matrices, rows, columns]`` to their updates, in place. At the owner, not collective.

    ``deterministic`` takes one matrix after the other, so that its bits do not depend on what else its owner has; else as many
    go through one batched call as working memory is good for.
    """
    num_rows, num_columns = directions.shape[1:]
    short = min(num_rows, num_columns)
    num_bytes = 2 * short * (num_rows + num_columns) * settings.recipe.dtype.itemsize
    budget = _CPU_BATCH_BYTES if directions.device.type == "cpu" else _BATCH_BYTES
    most = 1 if deterministic else max(1, budget // num_bytes)
    for batch in directions.unbind() if most == 1 else torch.split(directions, most):
        _transform(batch, settings, scratch)


def _transform(directions: Tensor, settings: MuonSettings, scratch: Scratch) -> None:
    original = directions if settings.stable_rank_floor is None else directions.clone()
    orthogonalize_into(directions, directions, settings.recipe, scratch)
    if settings.stable_rank_floor is not None:
        directions.copy_(guarded(directions, original, settings.stable_rank_floor))
    if settings.spectral_cap is not None:
        directions.copy_(capped(directions, settings.spectral_cap))


def apply(
    parameter: Tensor,
    update: Tensor,
    settings: UpdateSettings,
    *,
    num_rows: int,
    num_columns: int,
) -> None:
    """Move a rectangle of a parameter by its part of the update, in place.

    Decay is decoupled and takes the group's own rate: ``W <- (1 - lr wd) W - lr scale(m, n) U``. Cautious decay leaves out the
    elements that the update already takes away from zero: it decays where ``U W >= 0`` (L. Chen et al., Cautious weight decay,
    arXiv 2510.12402).

    Args:
        parameter, update: of one shape. Arithmetic is done in fp32 at least.
        settings: of the matrix's group.
        num_rows, num_columns: the shape of the whole matrix, for the scale.
    """
    kept, step_size = move(settings, num_rows, num_columns)
    if not settings.cautious_decay and kernels.takes(parameter, narrow=update):
        kernels.add_update(parameter, update, kept, -step_size)
        return
    precise = torch.promote_types(parameter.dtype, torch.float32)
    for part, of_update in _blocks(parameter, update):
        weights = part.to(precise)
        if settings.weight_decay:
            weights.mul_(cautious_factors(weights * of_update, kept) if settings.cautious_decay else kept)
        weights.add_(of_update, alpha=-step_size)
        if weights is not part:
            part.copy_(weights)


def move(settings: UpdateSettings, num_rows: int, num_columns: int) -> tuple[float, float]:
    """What decay keeps of a weight, and by how much of its update it then moves: ``1 - lr wd`` and ``lr scale(m, n)``."""
    return 1 - settings.lr * settings.weight_decay, adjusted_lr(settings.lr, settings.scale, num_rows, num_columns)


def cautious_factors(products: Tensor, kept: float) -> Tensor:
    """What cautious decay keeps of each weight, from the products of weights and updates; of any shape."""
    return torch.where(products >= 0, kept, 1.0)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape ``[rows, columns]``, cut alike into blocks of rows."""
    num_rows, num_columns = tensors[0].shape
    if tensors[0].device.type == "cpu":
        num_rows = max(1, _BLOCK_ELEMENTS // max(1, num_columns))
    return zip(*(torch.split(tensor, max(1, num_rows)) for tensor in tensors), strict=True)
