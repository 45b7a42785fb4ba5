"""What a parameter group says beyond its algorithm's own fields: views, rows that AdamW updates, shapes; checked on load."""

from collections.abc import Mapping, Sequence
from typing import Any

from omn_dist.algorithms.row_numbers import MATRIX_ALGORITHMS
from omn_dist.plan.views import VIEW_FIELDS, View
from omn_dist.presets import Preset

ROW_FIELDS: Mapping[str, str] = {
    "adamw_lr": "adamw_lr",
    "adamw_betas": "adamw_betas",
    "adamw_eps": "adamw_epsilon",
    "adamw_weight_decay": "adamw_weight_decay",
}
"""Fields for the rows that are no matrix, in a group whose view has some, and the preset's field that fills each."""
ROW_LR_BASE = "adamw_lr_base"
"""Field with the ``lr`` of the matrices at which the rows have exactly ``adamw_lr``."""
MATRIX_GROUP_FIELDS = (*VIEW_FIELDS, *ROW_FIELDS, ROW_LR_BASE)
"""Fields that a matrix group may have beside those of its algorithm."""


def complete_view(group: dict[str, Any], preset: Preset) -> None:
    """Bring the view of a matrix group into its plain form, and fill the fields of its AdamW rows, in place.

    ``muon_split_sizes`` without ``muon_shape`` split the rows of two-dim parameters of one shape.

    Raises:
        ValueError: a view that cannot be, or one that is not complete.
    """
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
        for field, source in ROW_FIELDS.items():
            group.setdefault(field, getattr(preset, source))
        group.setdefault(ROW_LR_BASE, float(group["lr"]))


def row_lr(group: Mapping[str, Any]) -> float:
    """The rate of a group's AdamW rows at this step: ``adamw_lr``, moved in proportion by whatever schedules ``lr``.

    Exactly ``adamw_lr`` while ``lr`` is ``adamw_lr_base``, and always when that base is zero.
    """
    lr, base = float(group["lr"]), float(group[ROW_LR_BASE])
    return float(group["adamw_lr"]) * (1.0 if lr == base or base == 0 else lr / base)


def group_description(group: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the meaning of the state of a group's parameters, apart from names and shapes; JSON-able."""
    view = View.from_group(group) if group["algorithm"] in MATRIX_ALGORITHMS else None
    fields = view.as_fields() if view is not None else {}
    return {
        "algorithm": group["algorithm"],
        **{field: list(value) if isinstance(value, tuple) else value for field, value in fields.items()},
    }


def check_saved_groups(saved: Sequence[Mapping[str, Any]], built: Sequence[Mapping[str, Any]]) -> None:
    """Refuse saved groups that hold other parameters, shapes, algorithms or views than those that were built.

    Raises:
        ValueError: the first parameter that differs, and how.
    """
    here = {name: (group, index) for group in built for index, name in enumerate(group["param_names"])}
    for group in saved:
        for index, name in enumerate(group.get("param_names", ())):
            if name not in here:
                continue
            other, other_index = here[name]
            if "param_shapes" in group:
                shapes = tuple(group["param_shapes"][index]), tuple(other["param_shapes"][other_index])
                _same(name, "shape", *shapes)
            found, expected = group_description(group), group_description(other)
            for field in ("algorithm", *VIEW_FIELDS):
                _same(name, field, found.get(field), expected.get(field))
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


def _same(name: str, field: str, saved: Any, built: Any) -> None:
    if saved != built:
        raise ValueError(
            f"parameter {name}: {field} saved as {saved!r}, found {built!r} here; expected the same groups, since another grouping "
            "is another recipe"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
