"""Parameters that a program exchanged in ``param_groups`` after the optimizer was built.

accelerate builds the optimizer first, then shards the model with FSDP2 and puts the new parameters
where the old ones were. State follows them: by name where a parameter was known, else by its place
in the group.
"""

import gc
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omn_dist.optim.state import converted, due_state

Known = Sequence[Sequence[Tensor]]
"""The parameters of each group, as the optimizer last saw them."""


def is_exchanged(groups: Sequence[Mapping[str, Any]], known: Known) -> bool:
    """Whether groups hold other parameters than the known ones."""
    return any(
        len(group["params"]) != len(seen) or any(now is not before for now, before in zip(group["params"], seen, strict=True))
        for group, seen in zip(groups, known, strict=True)
    )


def moved_state(
    groups: Sequence[dict[str, Any]], known: Known, states: Mapping[Tensor, dict[str, Any]], *, master_weights: bool
) -> dict[Tensor, dict[str, Any]]:
    """The state of the parameters that the groups hold now, from that of the known ones.

    A parameter that only changed its place keeps its name, so names of groups may change in place.
    Collective where state has to move to another mesh.

    Raises:
        ValueError: a group with more or fewer parameters, or one whose shape is another.
    """
    names = {
        parameter: name
        for group, seen in zip(groups, known, strict=True)
        for name, parameter in zip(group["param_names"], seen, strict=True)
    }
    moved: dict[Tensor, dict[str, Any]] = {}
    names_by_group = []
    for number, (group, seen) in enumerate(zip(groups, known, strict=True)):
        if len(group["params"]) != len(seen):
            raise ValueError(
                f"group {number}: found {len(group['params'])} parameters, expected the {len(seen)} that it was built with; "
                "use add_param_group for more, or build a new optimizer"
            )
        found_names = []
        for name, now, before in zip(group["param_names"], group["params"], seen, strict=True):
            if now in names:
                found_names.append(names[now])
                moved[now] = states.get(now, {})
                continue
            if now.shape != before.shape:
                raise ValueError(
                    f"parameter {name}: found one of shape {tuple(now.shape)} in its place, expected {tuple(before.shape)}; "
                    "build a new optimizer"
                )
            found_names.append(name)
            due = due_state(now, group, master_weights=master_weights)
            state = states.get(before, {})
            # In the order of the rule, the same on all ranks: moves between meshes are collective.
            moved[now] = {key: converted(name, _on_any_mesh(state[key], now), now, group, due[key]) for key in due if key in state}
        names_by_group.append(found_names)
    # Not before all groups were found good: a refused exchange changes nothing.
    for group, found_names in zip(groups, names_by_group, strict=True):
        group["param_names"] = found_names
    return moved


def _on_any_mesh(value: Any, parameter: Tensor) -> Any:
    """State that ``converted`` can take: whole, where its mesh is another one."""
    if isinstance(value, DTensor) and not (isinstance(parameter, DTensor) and value.device_mesh == parameter.device_mesh):
        return value.full_tensor()
    return value


def looks_replaced(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the model seems to hold other parameters than the groups.

    So it is when no module that is alive holds any of these parameters, and one holds another of
    the name and shape of one of them. It looks at all objects of the process, so ask only when
    something is wrong. Not collective.
    """
    own = {id(parameter) for group in groups for parameter in group["params"]}
    wanted = {
        (name.rpartition(".")[2], tuple(parameter.shape))
        for group in groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module) and "_parameters" in found.__dict__]
    held = [item for module in modules for item in module._parameters.items() if item[1] is not None]
    if any(id(parameter) in own for _, parameter in held):
        return False
    return any((name, tuple(parameter.shape)) in wanted for name, parameter in held)
