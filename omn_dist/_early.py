"""Directions that leave for their owners while backward goes on."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from omn_dist._domains import Domain
from omn_dist._multi_tensor_step import matrix_step
from omn_dist._step import checked_gradient
from omn_dist.plan.placement import local_tensor

_SAMPLES = 64
_CHANGED = (
    "found another gradient than the one that left for its owner during backward, expected it unchanged until step; do not clip, "
    "unscale or accumulate gradients of matrices after overlap_backward, and enter it for every backward that a step may follow"
)


class EarlyDirections:
    """What leaves early of one domain in one backward: a wave goes as soon as the gradients that this rank sends of it are there.

    Waves leave in one order on all ranks, from the last to the first.
    """

    def __init__(self, domain: Domain, state: Mapping[Tensor, Mapping[str, Any]], *, deterministic: bool) -> None:
        self._domain = domain
        self._gradients: dict[Tensor, Tensor] = {}
        self._sent: dict[str, tuple[tuple[int, int] | None, dict[str, Any]]] = {}
        self._samples: dict[str, Tensor] = {}
        self._step = matrix_step(domain, state, self._gradients, deterministic=deterministic)
        self._missing: list[set[str]] = [
            {domain.plan.matrices[place.matrix].parameter_name for place in domain.pipeline.places_sent(number)}
            for number in range(len(domain.plan.waves))
        ]

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Watch the gradients that arrive."""
        with ExitStack() as stack:
            for name in set().union(*self._missing):
                parameter, _ = self._domain.members[name]
                handle = parameter.register_post_accumulate_grad_hook(partial(self._arrived, name))  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
            yield

    @torch.no_grad()
    def check(self) -> None:
        """Raise ``RuntimeError`` when a gradient that was sent, or what makes a direction of it, is another one by now.

        Tensors and their versions are compared, and a few elements of each, since not every change counts as a new version. On
        CUDA the elements are compared on the device, and a difference is a device-side assertion.
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
            now = torch.cat([_sample(self._gradients[self._domain.members[name][0]]) for name in names])
            torch._assert_async(((now == then) | now.isnan()).all(), f"one of {len(names)} parameters: {_CHANGED}")

    @torch.no_grad()
    def _arrived(self, name: str, parameter: Tensor) -> None:
        gradient = checked_gradient(name, parameter)
        assert gradient is not None, "the hook runs after a gradient was accumulated"
        self._gradients[parameter] = gradient
        if name not in self._sent:
            _, group = self._domain.members[name]
            self._sent[name] = _identity(parameter), _direction_fields(group)
            self._samples[name] = _sample(gradient).clone()
        for missing in self._missing:
            missing.discard(name)
        while self._missing and not self._missing[-1]:
            self._missing.pop()
            self._domain.pipeline.gather_early(len(self._missing), self._step)


def can_leave_early(domain: Domain) -> bool:
    """Gradients of DTensors are reduced when they are accumulated; those of plain tensors (DDP) only after backward."""
    return domain.plan.world_size > 1 and all(isinstance(parameter, DTensor) for parameter, _ in domain.members.values())


def _identity(parameter: Tensor) -> tuple[int, int] | None:
    """Differs when the gradient of a parameter is gone or another tensor, or was changed in place as a DTensor.

    The version of its local part says nothing: FSDP2 cuts the gradients of several parameters from one buffer, and they share it.
    """
    gradient = parameter.grad
    return None if gradient is None else (local_tensor(gradient).data_ptr(), gradient._version)


def _direction_fields(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a group makes directions; the rest is read in the step."""
    return {name: group[name] for name in ("momentum", "momentum_rule", "nesterov")}


def _sample(gradient: Tensor) -> Tensor:
    """A few elements from all over a local gradient."""
    return gradient.flatten()[:: max(1, gradient.numel() // _SAMPLES)]
