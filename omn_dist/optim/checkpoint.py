"""Model and optimizer state by parameter name, and checks of a saved state.

The checks refuse a saved state that belongs to another model or to other parameter groups.

Everything here reads ``optimizer.state`` as it is. The state-dict helpers of torch are avoided on
purpose: on a fresh optimizer they run a hidden step, and on load they cast state to the dtype of
the parameter.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from omn_dist.optim.groups import group_description
from omn_dist.settings import SettingsError

StateByName = dict[str, dict[str, Tensor]]


def model_state_by_name(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model's state dict by name, each once and without a copy.

    A tied weight is listed under the first of its names.
    """
    seen: set[int] = set()
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state


def optimizer_state_by_name(optimizer: torch.optim.Optimizer) -> StateByName:
    """The state tensors by parameter name and state key, without a copy.

    An example is ``state["norm.weight"]["exp_avg"]``. Writing into the tensors changes the
    optimizer. The groups must have ``param_names``, and the optimizer must allocate its state at
    construction.

    Raises:
        SettingsError: a parameter has no state yet, or two parameters share a name.
    """
    state_by_name: StateByName = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            state = optimizer.state.get(parameter)
            if not state:
                raise SettingsError(f"optimizer: parameter {name!r} has no state, expected it from construction on")
            if name in state_by_name:
                raise SettingsError(f"optimizer: the name {name!r} belongs to two parameters, expected unique names")
            state_by_name[name] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return state_by_name


def describe_groups(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The fields that decide what each parameter's state means, by parameter name.

    They are JSON-able and go into a checkpoint.
    """
    return {
        name: {
            **group_description(group),
            "weight_decay": float(group["weight_decay"]),
            "shape": list(parameter.shape),
        }
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }


def check_groups(saved: Mapping[str, Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Refuse saved parameter groups that differ from those of the optimizer.

    Args:
        saved: what :func:`describe_groups` gave when the checkpoint was saved.
        optimizer: the optimizer of this run.

    Raises:
        SettingsError: names the first parameter that differs, the field, and both values.
    """
    built = describe_groups(optimizer)
    for name in sorted(set(saved) | set(built)):
        if name not in built:
            raise SettingsError(
                f"optimizer: parameter {name!r} is in the checkpoint but in no group of this run; load it into the "
                "model and the grouping it was saved from"
            )
        if name not in saved:
            raise SettingsError(
                f"optimizer: parameter {name!r} of this run is not in the checkpoint; load it into the model and the "
                "grouping it was saved from"
            )
        for field in dict.fromkeys((*built[name], *saved[name])):
            if saved[name].get(field) != built[name].get(field):
                raise SettingsError(
                    f"optimizer: {field} of parameter {name!r} is {saved[name].get(field)!r} in the checkpoint and "
                    f"{built[name].get(field)!r} in this run; use the grouping it was saved from"
                )


def check_tensors(metadata: Metadata, template: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint whose tensors do not fit those of ``template``. Call it before the load.

    A tensor does not fit when it is missing, or has another shape or dtype. Without this check
    torch.distributed.checkpoint casts to the dtype of the template and gives no warning.

    Args:
        metadata: of the stored checkpoint.
        template: the tensors to fill, by full name.

    Raises:
        SettingsError: names the first tensor that differs, what was found and what was expected.
    """
    for name in sorted(template):
        expected, stored = template[name], metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            raise SettingsError(f"checkpoint: tensor {name!r} is missing; load it into the model it was saved from")
        for field, found, wanted in (
            ("shape", tuple(stored.size), tuple(expected.shape)),
            ("dtype", stored.properties.dtype, expected.dtype),
        ):
            if found != wanted:
                raise SettingsError(
                    f"checkpoint: {field} of {name!r} is {found}, expected {wanted}; load it into the model and the "
                    "optimizer it was saved from"
                )
