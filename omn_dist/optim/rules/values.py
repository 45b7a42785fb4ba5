"""Checks of values by the name of their field, for presets and for parameter groups alike."""

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from omn_dist.algorithms.momentum import MOMENTUM_RULES
from omn_dist.algorithms.newton_schulz import group_recipe
from omn_dist.algorithms.scale import SCALE_MODES
from omn_dist.settings import SettingsError, unknown_name


def check_values(fields: Mapping[str, Any]) -> None:
    """Raise ``SettingsError`` for a value that no rule can use. Other fields are not checked."""
    check_choice(fields, "momentum_rule", MOMENTUM_RULES)
    check_choice(fields, "scale", SCALE_MODES)
    check_at_least_zero(fields, "lr", "weight_decay")
    check_fraction(fields, "momentum")
    for field in ("spectral_cap", "stable_rank_floor"):
        value = fields.get(field)
        if value is not None and not (_is_number(value) and value > 0):
            raise SettingsError(f"{field}: found {value!r}, expected a positive number, or null")
    if "newton_schulz" in fields:
        group_recipe(fields)


def check_choice(fields: Mapping[str, Any], field: str, choices: Iterable[str]) -> None:
    """Raise ``SettingsError``, with the nearest choice, for a value that is none of them."""
    if field in fields and fields[field] not in choices:
        raise SettingsError(unknown_name(field.replace("_", " "), str(fields[field]), choices))


def check_at_least_zero(fields: Mapping[str, Any], *names: str) -> None:
    """Raise ``SettingsError`` for a negative number or NaN in these fields. They may be absent."""
    for name in names:
        if name in fields and not (_is_number(fields[name]) and fields[name] >= 0):
            raise SettingsError(f"{name}: found {fields[name]!r}, expected a number >= 0")


def check_fraction(fields: Mapping[str, Any], *names: str) -> None:
    """Raise ``SettingsError`` for a number outside 0 to 1 in these fields. They may be absent."""
    for name in names:
        if name in fields and not (_is_number(fields[name]) and 0 <= fields[name] <= 1):
            raise SettingsError(f"{name}: found {fields[name]!r}, expected a number from 0 to 1")


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor | numbers.Real) and not isinstance(value, bool)
