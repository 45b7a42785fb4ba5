"""What programs give as groups: a model, groups in other optimizers' words, and what is refused."""

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omn_dist.optim.presets import PRESETS, Preset
from omn_dist.roles import build_parameter_groups
from omn_dist.roles.algorithms import FOR_MATRICES, FOR_OTHERS, algorithm_kind, known_algorithms
from omn_dist.settings import SettingsError, unknown_name

logger = logging.getLogger(__name__)

USE_MUON = "use_muon"
"""The field by which the groups of Keller Jordan's MuonWithAuxAdam choose between Muon and Adam."""
SCHEDULER_FIELDS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum")
"""Fields that torch's schedulers write into groups."""
_FOREIGN_FIELDS = ("name", "fused", "foreach", "capturable", "differentiable", "lr_scale")
"""Fields of other optimizers that change no result here, though some resemble fields of ours."""
_FIXED_FIELDS = {"maximize": False, "amsgrad": False, "decoupled_weight_decay": True}
"""Fields of other optimizers that would change the result, with the value that holds here."""
_NEAR = 0.7
"""Similarity (``difflib``) from which an unknown field counts as a misspelt one."""
_WRITE = "write DualOptimizer(model, ...), which finds names and algorithms of all parameters"


def given_groups(given: object, rules: Mapping[Any, Any] | None = None) -> list[dict[str, Any]]:
    """The groups that a program means by the first argument of the optimizer, as new dictionaries.

    Args:
        given: a model, or groups.
        rules: for the model, as in ``build_parameter_groups``.

    Raises:
        TypeError: neither of them; the message has the line to write instead.
        ValueError: no group, rules beside groups, or what ``build_parameter_groups`` raises.
    """
    if isinstance(given, nn.Module):
        return build_parameter_groups(given, rules=rules)
    if rules is not None:
        raise SettingsError(
            "rules: found them beside groups, expected a model; give them to build_parameter_groups(model, rules=...)"
        )
    check_ordered(given)
    if isinstance(given, Mapping):
        raise TypeError("groups: found one dictionary, expected a model or a list of groups; write DualOptimizer([group], ...)")
    if isinstance(given, Tensor | str) or not isinstance(given, Iterable):
        raise TypeError(f"groups: found {_kind(given)}, expected a model or groups; {_WRITE}")
    items = list(given)
    if not items:
        raise ValueError(f"groups: found none, expected a model or groups; {_WRITE}")
    for item in items:
        if not isinstance(item, Mapping):
            raise TypeError(f"groups: found {_kind(item)} among {len(items)} items, expected a model or groups; {_WRITE}")
    return [dict(item) for item in items]


def report_rates_of_muon(groups: Iterable[Mapping[str, Any]], preset: Preset) -> None:
    """Say once when groups with ``use_muon`` bring rates that a preset gives another meaning."""
    meant = PRESETS["torch"].scale
    has_rates = any(group.get(USE_MUON) is True and "lr" in group for group in groups)
    if has_rates and preset.scale != meant and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "groups with use_muon: their rates were chosen for the scale %s, preset %r has %s; pass preset='torch' to keep them",
            meant,
            preset.name,
            preset.scale,
        )


def check_ordered(parameters: object) -> None:
    """Raise ``TypeError``, like torch's optimizers, for parameters in a set."""
    if isinstance(parameters, set | frozenset):
        raise TypeError(
            "parameters: found a set, expected an ordered collection; the order of a set differs between runs and between "
            "ranks, so use a list"
        )


def complete_algorithm(group: dict[str, Any]) -> None:
    """Fill ``algorithm`` from ``use_muon`` where the group has that, in place.

    Raises:
        SettingsError: neither of them, a contradiction, or no boolean.
    """
    if USE_MUON in group:
        use_muon = group[USE_MUON]
        if not isinstance(use_muon, bool):
            raise SettingsError(f"{USE_MUON}: found {use_muon!r}, expected True or False")
        found = group.setdefault("algorithm", FOR_MATRICES if use_muon else FOR_OTHERS)
        if algorithm_kind(found).takes_matrices != use_muon:
            raise SettingsError(f"algorithm: found {found!r} in a group with {USE_MUON}={use_muon}, expected one of them only")
    elif group.get("algorithm") is None:
        raise SettingsError(
            f"group: found no 'algorithm', expected {FOR_MATRICES!r} or {FOR_OTHERS!r} (or {USE_MUON}=True or False); add it, or "
            f"{_WRITE}"
        )


def foreign_fields(group: Mapping[str, Any], known: Sequence[str], others: Iterable[str], label: str) -> list[str]:
    """The fields of a group that the optimizer does not know and leaves alone.

    Args:
        group: any group.
        known: the fields of a group on its algorithm.
        others: fields of groups on other algorithms, beside those that the algorithms list.
        label: of the algorithm, for messages.

    Raises:
        SettingsError: a field that is misspelt or another algorithm's, or one of another optimizer
            that would have to change the result.
    """
    found = []
    ours = {*known, *others, *(field for name in known_algorithms() for field in algorithm_kind(name).fields)}
    for key, value in group.items():
        if key in known or key in SCHEDULER_FIELDS:
            continue
        if key in _FIXED_FIELDS:
            if value != _FIXED_FIELDS[key]:
                raise SettingsError(f"{key}: found {value!r} in a group on {label}, expected {_FIXED_FIELDS[key]}; remove it")
        elif key not in _FOREIGN_FIELDS and (not isinstance(key, str) or difflib.get_close_matches(key, ours, n=1, cutoff=_NEAR)):
            raise SettingsError(unknown_name(f"field of a group on {label}", str(key), known))
        found.append(str(key))
    return found


def _kind(value: object) -> str:
    match value:
        case torch.Tensor():
            return "a parameter"
        case (str(), torch.Tensor()):
            return "a named parameter"
        case _:
            return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
