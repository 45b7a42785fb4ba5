"""Parameter groups: filled from the preset, checked, and compared with those of a saved state."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from omn_dist.optim.given import USE_MUON, check_ordered, complete_algorithm, foreign_fields
from omn_dist.optim.presets import Preset, field_type, plain_number
from omn_dist.optim.rules.registry import FOR_ROWS, ROW_PREFIX, algorithm_of, rule_by_name
from omn_dist.optim.rules.rule import Rule
from omn_dist.plan.geometry.placement import as_matrix, local_tensor
from omn_dist.plan.geometry.views import VIEW_FIELDS, View
from omn_dist.settings import SettingsError, convert

_COMMON_FIELDS = ("params", "param_names", "param_shapes", "algorithm", USE_MUON)
_RATES = ("lr", "adamw_lr")
_ALWAYS_TYPED = ("lr", "weight_decay")
ROW_FIELDS = ("adamw_lr", "adamw_betas", "adamw_eps", "adamw_weight_decay")
"""Fields for the rows that are no matrix, in a group whose view has some: AdamW's with a prefix."""
ROW_LR_BASE = "adamw_lr_base"
"""Field with the ``lr`` of the matrices at which the rows have exactly ``adamw_lr``."""


_MATRIX_FIELDS = (*VIEW_FIELDS, *ROW_FIELDS, ROW_LR_BASE)
"""Fields of groups of matrices, whatever their rule."""


def complete_group(group: dict[str, Any], preset: Preset, num_parameters: int) -> dict[str, Any]:
    """The group with every field of its rule, those that it lacks from the preset.

    A field of the group beats the preset's. Fields that the optimizer does not know stay as they
    are (:func:`unknown_fields` lists them).

    Args:
        group: as the program gave it; changed and returned.
        preset: fills what is missing.
        num_parameters: of the groups before it, to number parameters without a name.

    Raises:
        SettingsError: an unknown algorithm, a misspelt field, names that do not fit, or a value
            that the rule cannot use.
        TypeError: ``params`` that are no tensors, or that have no order.
        ValueError: a view that cannot be, or one that is not complete.
    """
    complete_algorithm(group)
    group["algorithm"] = algorithm_of(group["algorithm"], preset.algorithm)
    unknown_fields(group, preset)
    rule = rule_by_name(group["algorithm"])
    _complete_names(group, num_parameters)
    for field, default in rule.defaults(preset.as_fields()).items():
        group.setdefault(field, default)
    group["param_shapes"] = [tuple(parameter.shape) for parameter in group["params"]]
    try:
        _check_types(group, rule)
        if rule.takes_matrices:
            _complete_view(group, preset)
        rule.check(group)
    except SettingsError as error:
        raise SettingsError(f"{error} (group of {_some(group['param_names'])})") from None
    return group


def unknown_fields(group: Mapping[str, Any], preset: Preset) -> list[str]:
    """The fields of a group that the optimizer does not know and that change nothing.

    Raises:
        SettingsError: one that is misspelt, or that would have to change the result.
    """
    rule = rule_by_name(algorithm_of(group["algorithm"], preset.algorithm))
    known = [*rule.defaults(preset.as_fields()), *_COMMON_FIELDS, *(_MATRIX_FIELDS if rule.takes_matrices else ())]
    return foreign_fields(group, known, _MATRIX_FIELDS, rule.name)


def _complete_names(group: dict[str, Any], num_parameters: int) -> None:
    """``params`` as a list of tensors and ``param_names`` parallel to it, in place."""
    if "params" not in group:
        raise SettingsError("group: found no 'params', expected its parameters")
    given = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    check_ordered(given)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"params: found {given!r}, expected a list of parameters")
    parameters = list(given)
    if "param_names" not in group:
        named = [item for item in parameters if isinstance(item, tuple)]
        group["param_names"] = [name for name, _ in named] or [
            f"parameter_{num_parameters + position}" for position in range(len(parameters))
        ]
        parameters = [item[1] if isinstance(item, tuple) else item for item in parameters]
    names, group["params"] = group["param_names"], parameters
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise SettingsError(f"param_names: found {names!r}, expected a list of strings")
    if len(names) != len(parameters):
        raise SettingsError(f"group: found {len(names)} param_names for {len(parameters)} params, expected one each")
    for name, parameter in zip(names, parameters, strict=True):
        if not isinstance(parameter, Tensor):
            raise TypeError(f"params: found {type(parameter).__name__} as {name}, expected Tensors")


def _check_types(group: dict[str, Any], rule: Rule) -> None:
    """Bring the fields that presets have to their types, in place. Rates may stay tensors."""
    for field in (*_ALWAYS_TYPED, *rule.fields, *ROW_FIELDS):
        if field in group and field not in rule.own_fields:
            number = convert(field_type(field), plain_number(field, group[field]), path=field)
            if not (field in _RATES and isinstance(group[field], Tensor)):
                group[field] = number


def _complete_view(group: dict[str, Any], preset: Preset) -> None:
    """Bring the view of a group into its plain form and fill its AdamW row fields, in place.

    ``muon_split_sizes`` without ``muon_shape`` split the rows of two-dim parameters of one shape.
    """
    for field in VIEW_FIELDS:
        expected: Any = bool if field == "muon_transposed" else (list, tuple)
        if group.get(field) is not None and not isinstance(group[field], expected):
            raise SettingsError(f"{field}: found {group[field]!r}, expected {'True or False' if expected is bool else 'a tuple'}")
    if group.get("muon_shape") is None and any(group.get(field) for field in VIEW_FIELDS):
        shapes = {tuple(parameter.shape) for parameter in group["params"]}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            raise ValueError(
                f"parameters {group['param_names']}: found a view without muon_shape for shapes {sorted(shapes)}, expected "
                "parameters of one two-dim shape; give muon_shape"
            )
        (shape,) = shapes
        group["muon_shape"] = shape[::-1] if group.get("muon_transposed") else shape
    try:
        view = View.from_group(group)
    except ValueError as error:
        raise ValueError(f"parameters {_some(group['param_names'])}: {error}") from None
    for field in VIEW_FIELDS:
        group.pop(field, None)
    if view is None:
        return
    group.update(view.as_fields())
    if view.has_adamw_rows:
        for field, default in FOR_ROWS.defaults(preset.as_fields()).items():
            group.setdefault(ROW_PREFIX + field, default)
        group.setdefault(ROW_LR_BASE, float(group["lr"]))


def check_parameter(name: str, parameter: Tensor, group: Mapping[str, Any]) -> None:
    """Refuse a parameter that the optimizer, or the rule of its group, cannot update.

    Raises:
        TypeError: not a floating dtype.
        ValueError: on the meta device, a shape that the rule does not take, or memory that is not
            that of a matrix.
    """
    if parameter.is_meta:
        raise ValueError(
            f"parameter {name}: found it on the meta device, expected real memory; build the optimizer after to_empty, or use "
            "plan_ownership for a plan of meta parameters"
        )
    if not parameter.is_floating_point():
        raise TypeError(f"parameter {name}: found dtype {parameter.dtype}, expected a real floating one")
    rule = rule_by_name(group["algorithm"])
    rule.check_parameter(name, parameter, group)
    if not rule.needs_owner:
        return
    local = local_tensor(parameter.detach())
    try:
        as_matrix(local)
    except RuntimeError:
        raise ValueError(
            f"parameter {name}: found a local shape {tuple(local.shape)} with strides {local.stride()}, expected leading "
            "dims that are the rows of one matrix in memory; make it contiguous before the optimizer is built"
        ) from None


def warn_of_unknown_fields(groups: Iterable[Mapping[str, Any]], preset: Preset) -> None:
    """Warn once of the fields of other optimizers that groups have."""
    found = dict.fromkeys(field for group in groups for field in unknown_fields(group, preset))
    if found:
        warnings.warn(
            f"fields of parameter groups that change nothing in DualOptimizer: {', '.join(found)}; they stay in their groups",
            stacklevel=4,
        )


def warn_of_half_precision(group: Mapping[str, Any]) -> None:
    """Warn of parameters whose steps round away, since they have no masters."""
    half = [
        (name, parameter.dtype)
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        if parameter.dtype.itemsize < torch.float32.itemsize
    ]
    if half:
        name, dtype = half[0]
        warnings.warn(
            f"{len(half)} parameters on {group['algorithm']} such as {name} are {dtype}: a step or a decay of less than about "
            f"{torch.finfo(dtype).eps / 2:.1g} of a weight rounds away; keep parameters in float32 and cast in forward, or "
            "pass master_weights=True",
            stacklevel=4,
        )


def row_lr(group: Mapping[str, Any]) -> float:
    """The rate of a group's AdamW rows at this step: ``adamw_lr``, in proportion to ``lr``.

    So a schedule of ``lr`` schedules the rows too. Exactly ``adamw_lr`` while ``lr`` is
    ``adamw_lr_base``, and always when that base is zero.
    """
    lr, base = float(group["lr"]), float(group[ROW_LR_BASE])
    return float(group["adamw_lr"]) * (1.0 if lr == base or base == 0 else lr / base)


def set_row_lr(group: dict[str, Any], lr: float) -> None:
    """Set the rate of a group's AdamW rows for the ``lr`` that the group has now.

    A group without such rows does not change.
    """
    if ROW_LR_BASE in group:
        group["adamw_lr"], group[ROW_LR_BASE] = lr, float(group["lr"])


def row_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of AdamW for the rows of a group at this step."""
    return {field.removeprefix(ROW_PREFIX): group[field] for field in ROW_FIELDS} | {"lr": row_lr(group)}


def group_description(group: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a group that decide what its parameters' state means. JSON-able.

    Names and shapes of parameters are not among them.
    """
    view = View.from_group(group)
    fields = view.as_fields() if view is not None else {}
    return {
        "algorithm": group["algorithm"],
        **{field: list(value) if isinstance(value, tuple) else value for field, value in fields.items()},
    }


def check_saved_groups(saved: Sequence[Mapping[str, Any]], built: Sequence[Mapping[str, Any]]) -> None:
    """Refuse saved groups that differ from those that were built.

    They must hold the same parameters, with the same shapes, algorithms and views.

    Raises:
        ValueError: the first parameter that differs, and how.
    """
    here = {name: (group, index) for group in built for index, name in enumerate(group["param_names"])}
    for group in saved:
        for index, name in enumerate(group.get("param_names", ())):
            if name not in here:
                continue
            other, other_index = here[name]
            # Groups saved before shapes were recorded have none. An optimizer that has loaded such
            # groups has none either.
            if "param_shapes" in group and "param_shapes" in other:
                shapes = tuple(group["param_shapes"][index]), tuple(other["param_shapes"][other_index])
                _check_same(name, "shape", *shapes)
            if "algorithm" not in group:  # of an optimizer of torch
                continue
            found, expected = group_description(group), group_description(other)
            for field in ("algorithm", *VIEW_FIELDS):
                _check_same(name, field, found.get(field), expected.get(field))
    for number, (group, other) in enumerate(zip(saved, built, strict=False)):
        names, expected_names = list(group.get("param_names", other["param_names"])), list(other["param_names"])
        if names != expected_names:
            only_saved = [name for name in names if name not in expected_names]
            only_built = [name for name in expected_names if name not in names]
            where = f"only saved: {only_saved[:3]}, only here: {only_built[:3]}"
            if not only_saved and not only_built:
                where = "the same names in another order"
            raise ValueError(
                f"group {number}: saved with {len(names)} parameters, found {len(expected_names)} here ({where}); expected "
                "the same groups"
            )


def _check_same(name: str, field: str, saved: Any, built: Any) -> None:
    if saved != built:
        raise ValueError(
            f"parameter {name}: {field} saved as {saved!r}, found {built!r} here; expected the same groups, since another grouping "
            "is another recipe"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
