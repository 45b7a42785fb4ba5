"""A saved state dict, checked as a whole before anything changes, and turned into state."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from omn_dist.exchange.grid import Grid, first_problem
from omn_dist.optim.groups import check_saved_groups
from omn_dist.optim.rules.registry import rule_by_name
from omn_dist.optim.state import MASTER, check_fits, check_keys, converted, due_state, has_master

logger = logging.getLogger(__name__)
StateDict = Mapping[str, Any]
Groups = Sequence[dict[str, Any]]


def checked_and_converted(
    state_dict: StateDict, groups: Groups, grids: Sequence[Grid], *, master_weights: bool
) -> tuple[dict[Tensor, dict[str, Any]], list[dict[str, Any]]]:
    """State and groups to load: new tensors for the parameters of ``groups``. Changes nothing.

    Collective over ``grids``.

    Args:
        state_dict: what somebody gave.
        groups: those that were built.
        grids: of the ranks that share parameters, large ones first.
        master_weights: whether half-precision parameters have masters.

    Raises:
        ValueError: the state dict does not fit on one of the ranks; all of them raise it.
    """
    problem = None
    try:
        check_state_dict(state_dict, groups, master_weights=master_weights)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        problem = str(error)
    problem = first_problem(problem, grids)
    if problem is not None:
        raise ValueError(f"load_state_dict: {problem}")
    return loaded_state(state_dict, groups, master_weights=master_weights), loaded_groups(state_dict, groups)


def saved_states(state_dict: StateDict, groups: Groups) -> list[tuple[str, Tensor, dict[str, Any], dict[str, Any]]]:
    """Name, parameter, group and saved state of each parameter, matched by position."""
    matched = []
    for saved, group in zip(state_dict["param_groups"], groups, strict=True):
        for identity, name, parameter in zip(saved["params"], group["param_names"], group["params"], strict=True):
            matched.append((name, parameter, group, dict(state_dict["state"].get(identity) or {})))
    return matched


def check_state_dict(state_dict: StateDict, groups: Groups, *, master_weights: bool) -> None:
    """Refuse a state dict that does not fit the groups that were built. Not collective.

    Raises:
        ValueError: the groups hold other parameters, shapes, algorithms or views; a tensor is of
            another kind, shape, mesh or dtype; state is that of another algorithm. The message
            names the first parameter and key, what was found, and what was expected.
    """
    for key in ("param_groups", "state"):
        if not isinstance(state_dict, Mapping) or key not in state_dict:
            raise ValueError(f"state dict: found no {key!r}, expected what state_dict() of an optimizer returned")
    saved_groups = state_dict["param_groups"]
    sizes, built = [len(group["params"]) for group in saved_groups], [len(group["params"]) for group in groups]
    check_saved_groups(saved_groups, groups)
    if sizes != built:
        raise ValueError(f"state dict: found groups of {sizes} parameters, expected {built}; build the groups that were saved")
    for saved, group in zip(saved_groups, groups, strict=True):
        rule = rule_by_name(group["algorithm"])
        rule.check_saved(saved, group)
        rule.check(completed(saved, group))
    for name, parameter, group, state in saved_states(state_dict, groups):
        due = due_state(parameter, group, master_weights=master_weights)
        check_keys(name, state, due)
        for key, value in state.items():
            if key in due:
                check_fits(f"parameter {name}: {key}", value, parameter, group, due[key])


def completed(saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """The group with what was saved for its fields; those that the saved group lacks stay.

    Keys that a program had added are taken too. Of a group of another optimizer, which has no
    ``algorithm``, only the fields of this group are.
    """
    own = ("params", "param_names", "param_shapes", "algorithm")
    fields = {**saved, **group} if "algorithm" in saved else group
    return {field: group[field] if field in own else saved.get(field, fields[field]) for field in fields}


def loaded_state(state_dict: StateDict, groups: Groups, *, master_weights: bool) -> dict[Tensor, dict[str, Any]]:
    """New state tensors with what was saved, for all parameters that have any saved state.

    Says in the log what was converted or is missing. Collective where placements change.

    Args:
        state_dict: one that :func:`check_state_dict` has passed.
        groups: those that were built.
        master_weights: whether half-precision parameters have masters.
    """
    found: dict[Tensor, dict[str, Any]] = {}
    whole, missing, without_master, with_master = [], [], [], []
    for name, parameter, group, state in saved_states(state_dict, groups):
        if not state:
            missing.append(name)
            continue
        due = due_state(parameter, group, master_weights=master_weights)
        # In the order of the rule, the same on all ranks: a change of placements is collective.
        found[parameter] = {key: converted(name, state[key], parameter, group, due[key]) for key in due if key in state}
        if isinstance(parameter, DTensor) and any(_is_whole(value) for value in state.values()):
            whole.append(name)
        if has_master(parameter, master_weights=master_weights) and MASTER not in state:
            without_master.append(name)
        if MASTER in state and MASTER not in due:
            with_master.append(name)
    _say(whole, "were saved whole: each rank has taken its shard", level=logging.INFO)
    _say(missing, "have no saved state: it starts as zeros")
    _say(without_master, "were saved without masters: these start as their rounded weights")
    _say(with_master, "were saved with masters, which are dropped: pass master_weights=True to keep them")
    return found


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and not isinstance(value, DTensor)


def _say(names: Sequence[str], what: str, level: int = logging.WARNING) -> None:
    if names:
        logger.log(level, "load_state_dict: %d parameters such as %s %s", len(names), names[0], what)


def loaded_groups(state_dict: StateDict, groups: Groups) -> list[dict[str, Any]]:
    """The groups to load: saved values, defaults of this optimizer for what is not among them."""
    return [
        {**completed(saved, group), "params": list(saved["params"])}
        for saved, group in zip(state_dict["param_groups"], groups, strict=True)
    ]


def joined(state_dicts: Sequence[StateDict]) -> dict[str, Any]:
    """One state dict of several optimizers, whose groups follow each other.

    It moves a run from ``torch.optim.Muon`` and ``torch.optim.AdamW`` to one optimizer: join their
    state dicts in the order of its groups. Tensors are shared. Not collective.
    """
    groups: list[dict[str, Any]] = []
    state: dict[int, Any] = {}
    first = 0
    for state_dict in state_dicts:
        identities = [identity for group in state_dict["param_groups"] for identity in group["params"]]
        number = {identity: first + position for position, identity in enumerate(identities)}
        first += len(identities)
        groups += [{**group, "params": [number[identity] for identity in group["params"]]} for group in state_dict["param_groups"]]
        state |= {number[identity]: value for identity, value in state_dict["state"].items() if identity in number}
    return {"state": state, "param_groups": groups}
