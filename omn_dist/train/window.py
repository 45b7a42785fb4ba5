"""Accepting or rejecting a window: all ranks take the step, or none does.

One all-reduce after the last backward of a window gives every rank the loss, whether any value on
any rank is not finite, whether any rank was asked to stop, and the gradient norm of each group. A
rejected window does not change weights, optimizer state, tokens or steps; its data are not read
again.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from omn_dist.train.norms import GroupView, group_square_sums, local_norms, local_part


class RejectedWindowsError(RuntimeError):
    """Too many windows in a row were rejected. All ranks raise it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement of a window; the same on all ranks."""

    accepted: bool
    """Whether loss and gradients are finite on every rank."""
    loss: float
    """Mean loss over the tokens of the window, in nats."""
    stop: bool
    """Whether any rank was asked to stop."""
    gradient_norms: dict[str, float]
    """Gradient norm over all ranks by group label, before clipping."""
    offender: str | None
    """What was not finite in a rejected window: a gradient or the loss, and on which rank."""


def judge_window(groups: Sequence[GroupView], loss: Tensor, *, stop: bool) -> Verdict:
    """Decide on all ranks alike whether a window is accepted, after its last backward.

    Reads gradients and changes nothing. Collective: all ranks must call. One all-reduce, and an
    all-gather of names if the window is rejected.

    Args:
        groups: all groups of the optimizer.
        loss: this rank's mean loss over its part of the window, a scalar; all parts have the same
            number of tokens.
        stop: whether this rank was asked to stop.
    """
    device = loss.device
    sums, finite = group_square_sums(groups, lambda parameter: parameter.grad, device)
    finite = finite & loss.isfinite()
    asked_to_stop = torch.full((), float(stop), dtype=torch.float64, device=device)
    message = torch.cat((torch.stack((loss.detach().double(), (~finite).double(), asked_to_stop)), sums))
    world_size = 1
    if dist.is_initialized():
        world_size = dist.get_world_size()
        dist.all_reduce(message)
    loss_sum, not_finite, stops, *squares = message.tolist()
    accepted = not_finite == 0
    return Verdict(
        accepted=accepted,
        loss=loss_sum / world_size,
        stop=stops > 0,
        gradient_norms={group.label: math.sqrt(square) for group, square in zip(groups, squares, strict=True)},
        offender=None if accepted else _find_offender(groups, loss),
    )


def _find_offender(groups: Sequence[GroupView], loss: Tensor) -> str:
    """What is not finite, and where.

    Names all ranks with such a loss, and the first such gradient of the lowest rank that has one.
    """
    named = [pair for group in groups for pair in zip(group.names, group.parameters, strict=True)]
    present = [(name, parameter.grad) for name, parameter in named if parameter.grad is not None]
    finite = local_norms([gradient for _, gradient in present], loss.device).isfinite().tolist()
    bad_names = [name for (name, _), good in zip(present, finite, strict=True) if not good]
    report = (not bool(loss.isfinite()), bad_names[0] if bad_names else None)
    reports = [report]
    if dist.is_initialized():
        reports = [report] * dist.get_world_size()
        dist.all_gather_object(reports, report)
    parts = []
    loss_ranks = [rank for rank, (bad_loss, _) in enumerate(reports) if bad_loss]
    if loss_ranks:
        parts.append(f"loss on rank {', '.join(map(str, loss_ranks))}")
    gradients = [(rank, name) for rank, (_, name) in enumerate(reports) if name is not None]
    if gradients:
        parts.append("gradient of {1!r} on rank {0}".format(*gradients[0]))
    return " and ".join(parts)


def clip_gradients(groups: Sequence[GroupView], verdict: Verdict, max_norm: float | None) -> float:
    """Scale the gradients of all clipped groups to a common norm of at most ``max_norm``, in place.

    Like ``torch.nn.utils.clip_grad_norm_`` on these groups: the factor is
    ``min(1, max_norm / (norm + 1e-6))``. Gradients of other groups do not change. Not collective,
    since the verdict has the norms.

    Returns:
        The factor; 1.0 where nothing was clipped.
    """
    clipped = [group for group in groups if group.clipped]
    norm = math.sqrt(sum(verdict.gradient_norms[group.label] ** 2 for group in clipped))
    if max_norm is None or norm + 1e-6 <= max_norm:
        return 1.0
    factor = max_norm / (norm + 1e-6)
    for group in clipped:
        for parameter in group.parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(factor)
    return factor
