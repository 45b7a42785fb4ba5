"""The table of parameter groups that a run prints before its first step."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import nn

from omn_dist.plan.geometry.views import View
from omn_dist.roles.algorithms import FOR_OTHERS, algorithm_kind


def format_groups(groups: Sequence[Mapping[str, Any]], model: nn.Module | None = None) -> str:
    """A table with one line a group: algorithm, decay, learning rate, sizes, view and names.

    Args:
        groups: ``param_groups`` of an optimizer, which have the rates and decays in effect; or from
            ``build_parameter_groups``, where ``-`` is what the optimizer fills.
        model: if given, *entries* counts all names of tied weights, as a ``state_dict`` does.

    Rows of a view that AdamW updates have a line of their own below their group. If no parameter
    outside of the matrices decays, an empty line says so.

    Raises:
        SettingsError: a group whose algorithm is not registered.
    """
    further = _further_names(model) if model is not None else {}
    lines: list[tuple[str, ...]] = [("algorithm", "decay", "lr", "tensors", "entries", "elements", "share", "view", "names")]
    total = sum(parameter.numel() for group in groups for parameter in group["params"])
    num_tensors = num_entries = 0
    for group in _with_empty_decay_group(groups):
        parameters, names = group["params"], group["param_names"]
        elements = sum(parameter.numel() for parameter in parameters)
        entries = len(names) + sum(further.get(id(parameter), 0) for parameter in parameters)
        num_tensors, num_entries = num_tensors + len(names), num_entries + entries
        kind = algorithm_kind(group["algorithm"])
        view = View.from_group(group) if kind.takes_matrices else None
        in_rows = 0 if view is None else view.num_adamw_elements * len(names)
        shown = names if len(names) <= 2 else [names[0], "...", names[-1]]
        lines.append(
            (
                kind.label,
                _number(group, "weight_decay"),
                _number(group, "lr"),
                f"{len(names):,}",
                f"{entries:,}",
                f"{elements - in_rows:,}",
                f"{(elements - in_rows) / total:.4%}",
                "-" if view is None else str(view),
                " ".join(shown) or "(none)",
            )
        )
        if in_rows:
            label, decay, rate = algorithm_kind(FOR_OTHERS).label, _number(group, "adamw_weight_decay"), _number(group, "adamw_lr")
            share = f"{in_rows / total:.4%}"
            lines.append((label, decay, rate, "0", "0", f"{in_rows:,}", share, "-", "(rows of the line above)"))
    lines.append(("total", "", "", f"{num_tensors:,}", f"{num_entries:,}", f"{total:,}", f"{1:.4%}", "", ""))
    if all(line[7] in ("view", "-", "") for line in lines):
        lines = [(*line[:7], line[8]) for line in lines]
    return align_columns(lines, right=range(1, 7))


def align_columns(lines: Sequence[Sequence[str]], *, right: Container[int]) -> str:
    """Cells as text with aligned columns; those in ``right`` are aligned to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _number(group: Mapping[str, Any], field: str) -> str:
    return "-" if group.get(field) is None else f"{float(group[field]):g}"


def _with_empty_decay_group(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The groups, with an empty one that decays before the others where none of those decays."""
    shown = list(groups)
    others = [position for position, group in enumerate(shown) if not algorithm_kind(group["algorithm"]).takes_matrices]
    if others and not any(shown[position].get("weight_decay", True) for position in others):
        empty: dict[str, Any] = {"algorithm": FOR_OTHERS, "params": [], "param_names": []}
        shown.insert(others[0], empty)
    return shown


def _further_names(model: nn.Module) -> dict[int, int]:
    """How many names each parameter has beyond its first, by ``id``."""
    counts: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        counts[id(parameter)] = counts.get(id(parameter), -1) + 1
    return counts
