"""What a step has to give, from weights, state, gradients and groups alone.

A fresh optimizer is filled with them and takes one step. So nothing that an optimizer remembers
beside its state counts: views, plans, early gathers, replaced parameters, masters of weights that
somebody else wrote. Where torch.optim has the same recipe, it takes the step too.
"""

from collections.abc import Mapping
from typing import Any

import torch
from machine import Machine
from torch import Tensor, nn

from omn_dist import DualOptimizer

MASTER = "master"
TOLERANCE = 0.0
"""Largest difference from torch.optim, relative to the norm of the step."""


class Expectation:
    """Made before a step in one process, compared after it."""

    def __init__(self, machine: Machine) -> None:
        self._weights = {name: parameter.detach().clone() for name, parameter in machine.named().items()}
        self._gradients = {
            name: None if parameter.grad is None else parameter.grad.detach().clone() for name, parameter in machine.named().items()
        }
        self._before = {
            name: {key: value.clone() for key, value in machine.state_of(parameter).items()}
            for name, parameter in machine.named().items()
        }
        self._parameters = {name: self._parameter(name) for name in self._weights}
        self._state: dict[str, dict[str, Tensor]] = {}
        self._published: dict[str, Tensor] = {}
        if any(gradient is not None for gradient in self._gradients.values()):
            self._step(machine)
            if machine.program.is_published:
                self._published = self._as_torch(machine)

    def _parameter(self, name: str) -> nn.Parameter:
        parameter = nn.Parameter(self._weights[name].clone())
        parameter.grad = None if self._gradients[name] is None else self._gradients[name].clone()  # type: ignore[union-attr]
        return parameter

    def _step(self, machine: Machine) -> None:
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_shapes", "differentiable")}
            | {"params": [self._parameters[name] for name in group["param_names"]]}
            for group in machine.optimizer.param_groups
        ]
        optimizer = DualOptimizer(groups, **dict(machine.program.options) | {"master_weights": machine.has_masters})
        for name, parameter in self._parameters.items():
            for key, value in optimizer.state[parameter].items():
                optimizer.state[parameter][key] = self._filled(name, key, value)
        optimizer.step()
        self._state = {name: dict(optimizer.state[parameter]) for name, parameter in self._parameters.items()}

    def _filled(self, name: str, key: str, fresh: Tensor) -> Tensor:
        """The state before the step: wide enough for it; a master follows weights that somebody else wrote."""
        before, weight = self._before[name].get(key), self._weights[name]
        if before is None:
            return fresh
        if key == MASTER:
            return torch.where(before.to(weight.dtype) == weight, before, fresh)
        return before.to(torch.promote_types(before.dtype, fresh.dtype), copy=True)

    def _as_torch(self, machine: Machine) -> dict[str, Tensor]:
        """The weights after a step of torch's own optimizers."""
        found: dict[str, Tensor] = {}
        for group in machine.optimizer.param_groups:
            parameters = {name: self._parameter(name) for name in group["param_names"] if self._weights[name].numel()}
            if not parameters or {parameter.dtype for parameter in parameters.values()} != {torch.float32}:
                continue
            optimizer: torch.optim.Optimizer
            lr = float(group["lr"])
            if group["algorithm"] == "muon":
                fields = {key: group[key] for key in ("weight_decay", "momentum", "nesterov")}
                optimizer = torch.optim.Muon(parameters.values(), lr=lr, **fields)
            elif group["algorithm"] == "adamw":
                fields = {key: group[key] for key in ("weight_decay", "betas", "eps")}
                optimizer = torch.optim.AdamW(parameters.values(), lr=lr, **fields)
            else:
                continue
            for name, parameter in parameters.items():
                if self._before[name] and all(value.dtype == torch.float32 for value in self._before[name].values()):
                    optimizer.state[parameter] = {key: value.clone() for key, value in self._before[name].items()}
                elif self._before[name]:
                    del parameter.grad
            optimizer.step()
            found |= {name: parameter.detach() for name, parameter in parameters.items() if parameter.grad is not None}
        return found

    def differences(self, machine: Machine) -> list[str]:
        """What the step did otherwise than expected; the first one."""
        for name, parameter in machine.named().items():
            if not _equal(parameter.detach(), self._parameters[name].detach()):
                return [f"weight {name} is not that of a fresh optimizer's step"]
            state = machine.state_of(parameter)
            moved = self._gradients[name] is not None
            expected: Mapping[str, Any] = self._state[name] if name in self._state else self._before[name]
            for key, value in expected.items():
                if not moved and key not in state and key not in self._before[name]:
                    continue
                if not moved and key == MASTER and key in state and _equal(state[key].to(parameter.dtype), parameter.detach()):
                    # Whether a master follows at once or at the next step with a gradient is the same.
                    continue
                if not moved and key == MASTER and key not in state and parameter.dtype.itemsize >= torch.float32.itemsize:
                    continue  # a cast to fp32 made it needless
                if key not in state or not _equal(state[key], value):
                    return [f"state {key} of {name} is {'not that of a fresh optimizer' if key in state else 'missing'}"]
            gradient = self._gradients[name]
            if gradient is not None and (parameter.grad is None or not _equal(parameter.grad, gradient)):
                return [f"the step changed the gradient of {name}"]
        for name, weight in self._published.items():
            moved_by = float((weight - self._weights[name]).norm())
            if float((weight - self._parameters[name].detach()).norm()) > TOLERANCE * moved_by:
                error = float((weight - self._parameters[name].detach()).norm()) / max(moved_by, 1e-30)
                return [f"weight {name} is {error:.3g} of a step from torch.optim's"]
        return []


def _equal(found: Tensor, expected: Tensor) -> bool:
    """Equal numbers; state may be wider than a fresh optimizer's."""
    return torch.allclose(found.double(), expected.double(), rtol=0, atol=0, equal_nan=True)
