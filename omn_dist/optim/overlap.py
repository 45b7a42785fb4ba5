"""Gathers that start during backward: each wave is sent as soon as its gradients are reduced."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from omn_dist.optim.domains import Domain
from omn_dist.optim.shards import checked_gradient
from omn_dist.plan.geometry.placement import local_tensor

_SAMPLES = 64
_CHANGED = (
    "found another gradient than the one that left for its owner during backward, expected it unchanged until step; do not clip, "
    "unscale or accumulate gradients of matrices after overlap_backward, and enter it for every backward that a step may follow"
)


class EarlyGathers:
    """The gathers of one domain that start in one backward.

    The gather of a wave starts when this rank has the gradients of what it sends in that wave. All
    ranks start gathers in one order, from the last wave to the first.
    """

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._gradients: dict[str, Tensor] = {}
        self._sent: dict[str, tuple[tuple[int, int] | None, dict[str, Any]]] = {}
        self._samples: dict[str, Tensor] = {}
        domain.step.begin({})
        self._missing: list[set[str]] = [
            {domain.plan.matrices[indexed.matrix].parameter_name for indexed in domain.pipeline.regions_sent(number)}
            for number in range(len(domain.plan.waves))
        ]

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Watch the gradients that arrive, and start gathers."""
        with ExitStack() as stack:
            for name in set().union(*self._missing):
                parameter, _ = self._domain.members[name]
                if not parameter.requires_grad:  # frozen: no gradient comes, and its wave leaves in the step
                    continue
                handle = parameter.register_post_accumulate_grad_hook(partial(self._arrived, name))  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
            yield

    @torch.no_grad()
    def check(self) -> None:
        """Raise ``RuntimeError`` when a gradient or a momentum setting changed after it was used.

        A direction that was sent depends on both. Tensors, their versions and a few elements of
        each are compared, since not every change raises a version. On CUDA the elements are
        compared on the device: a difference is a device-side assertion.
        """
        for name, (sent, fields) in self._sent.items():
            parameter, group = self._domain.members[name]
            if _identity(parameter) != sent:
                raise RuntimeError(f"parameter {name}: {_CHANGED}")
            if (found := _direction_fields(group)) != fields:
                raise RuntimeError(
                    f"parameter {name}: found {found} in its group, expected {fields} as when its direction left during backward; "
                    "change them before overlap_backward"
                )
        if self._samples:
            names = list(self._samples)
            then = torch.cat([self._samples[name] for name in names])
            now = torch.cat([_sample(self._gradients[name]) for name in names])
            # Private: torch has no public check that does not wait for the device.
            torch._assert_async(((now == then) | now.isnan()).all(), f"one of {len(names)} parameters: {_CHANGED}")

    @torch.no_grad()
    def _arrived(self, name: str, parameter: Tensor) -> None:
        gradient = checked_gradient(name, parameter)
        assert gradient is not None, "the hook runs after a gradient was accumulated"
        self._gradients[name] = gradient
        self._domain.step.set_gradient(name, gradient)
        if name not in self._sent:
            _, group = self._domain.members[name]
            self._sent[name] = _identity(parameter), _direction_fields(group)
            self._samples[name] = _sample(gradient).clone()
        for missing in self._missing:
            missing.discard(name)
        while self._missing and not self._missing[-1]:
            self._missing.pop()
            self._domain.pipeline.gather_early(len(self._missing), self._domain.step)


def can_leave_early(domain: Domain) -> bool:
    """Whether gathers of the domain may start during backward.

    They may where several ranks work together and gradients are reduced when they are accumulated:
    those of DTensors are, those of DDP are not.
    """
    return domain.plan.world_size > 1 and all(isinstance(parameter, DTensor) for parameter, _ in domain.members.values())


def _identity(parameter: Tensor) -> tuple[int, int] | None:
    """Address and version of the gradient of a parameter; ``None`` without one.

    They differ when the gradient is another tensor, or was changed in place as a DTensor. The
    version of its local part is of no use: FSDP2 cuts the gradients of several parameters from one
    buffer, and they share its version.
    """
    gradient = parameter.grad
    # Private: the only counter of in-place changes that a tensor has.
    return None if gradient is None else (local_tensor(gradient).data_ptr(), gradient._version)


def _direction_fields(group: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a group that directions depend on; the others are read in the step."""
    return {name: value for name, value in group.items() if name in ("momentum", "momentum_rule", "nesterov")}


def _sample(gradient: Tensor) -> Tensor:
    """A few elements from all over a local gradient."""
    return gradient.flatten()[:: max(1, gradient.numel() // _SAMPLES)]
