"""Sees to it that each parameter of the groups has the state that is due."""

import logging
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omn_dist.optim.exchanged import is_exchanged, moved_state
from omn_dist.optim.groups import check_parameter
from omn_dist.optim.state import MASTER, follow_parameter, settle
from omn_dist.plan.geometry.placement import local_tensor

logger = logging.getLogger(__name__)
Groups = Sequence[dict[str, Any]]
States = MutableMapping[Tensor, dict[str, Any]]


class _Settled(NamedTuple):
    """A parameter whose state was found complete, and by what one sees that it still is."""

    parameter: Tensor
    dtype: torch.dtype
    device: torch.device
    state: dict[str, Any]
    num_tensors: int

    def holds(self, states: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether dtype, device and state of the parameter are the same since."""
        parameter, state = self.parameter, states.get(self.parameter)
        is_kept = state is self.state and len(self.state) == self.num_tensors
        return is_kept and parameter.dtype == self.dtype and parameter.device == self.device


class StateKeeper:
    """Knows the parameters of an optimizer's groups, and keeps their state complete.

    Args:
        master_weights: whether half-precision parameters have fp32 masters.
    """

    def __init__(self, *, master_weights: bool) -> None:
        self._master_weights = master_weights
        self._known: list[list[Tensor]] = []
        self._settled: list[_Settled] = []

    def parameters(self) -> Iterator[Tensor]:
        """The parameters of all groups, as last seen."""
        return (parameter for seen in self._known for parameter in seen)

    def know(self, groups: Groups) -> None:
        """Take the groups as they are."""
        self._known = [list(group["params"]) for group in groups]
        self._settled = []

    def add(self, group: dict[str, Any], states: States) -> None:
        """Make the state of a new group."""
        self._settle_group(group, states)
        self._known.append(list(group["params"]))
        self._settled = []

    def take_exchanged(self, groups: Groups, states: States) -> bool:
        """Move state to the parameters that a program put into groups in place of others.

        Returns:
            Whether there were any. Then the call was collective.

        Raises:
            ValueError: a group with more or fewer parameters, or one of another shape.
        """
        if not is_exchanged(groups, self._known):
            return False
        moved = moved_state(groups, self._known, states, master_weights=self._master_weights)
        for group in groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                check_parameter(name, parameter, group)
        states.clear()
        states.update(moved)
        self.know(groups)
        logger.warning("param_groups hold other parameters than the optimizer was built with: their state followed")
        return True

    def settle(self, groups: Groups, states: States) -> bool:
        """Make the state that is missing, and convert what was cast. Not collective.

        Next to free when nothing happened since the last call.

        Returns:
            Whether anything happened.

        Raises:
            ValueError: state that does not fit its parameter.
        """
        if self._settled and all(settled.holds(states) for settled in self._settled):
            return False
        missing = [name for group in groups for name in self._settle_group(group, states)]
        self._settled = [
            _Settled(parameter, parameter.dtype, parameter.device, states[parameter], len(states[parameter]))
            for parameter in self.parameters()
        ]
        if missing:
            logger.warning("%d parameters such as %s had no state: it starts anew", len(missing), missing[0])
        return True

    def follow_parameters(self, states: States) -> None:
        """Bring masters up to date with what others wrote into their parameters. Not collective."""
        for parameter in self.parameters():
            if MASTER in states[parameter]:
                follow_parameter(local_tensor(states[parameter][MASTER]), local_tensor(parameter.detach()))

    def _settle_group(self, group: dict[str, Any], states: States) -> list[str]:
        """Bring the state of a group to what its rule needs; names of those that lacked any."""
        missing = []
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            state = states.setdefault(parameter, {})
            if settle(state, name, parameter, group, master_weights=self._master_weights):
                missing.append(name)
        return missing
