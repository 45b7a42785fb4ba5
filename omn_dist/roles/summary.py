"""The table of groups that a run prints before its first step."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import nn

from omn_dist.plan.views import View


def format_groups(groups: Sequence[Mapping[str, Any]], model: nn.Module | None = None) -> str:
    """A table of the groups: algorithm, decay, learning rate, tensors, elements, share, view and the ends of the list of names.

    Args:
        groups: of ``build_parameter_groups``, or ``param_groups`` of an optimizer (then with learning rates).
        model: where given, further names of tied weights are counted as entries, as a ``state_dict`` does.

    Rows of a view that AdamW updates have a line of their own below their group. The decaying AdamW group is shown even when it is
    empty, so that nobody has to wonder.
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
        view = View.from_group(group) if group["algorithm"] != "adamw" else None
        in_rows = 0 if view is None else view.num_adamw_elements * len(names)
        shown = names if len(names) <= 2 else [names[0], "...", names[-1]]
        lines.append(
            (
                {"muon": "Muon", "normuon": "NorMuon", "adamw": "AdamW"}.get(group["algorithm"], group["algorithm"]),
                f"{group['weight_decay']:g}",
                _rate(group, "lr"),
                f"{len(names):,}",
                f"{entries:,}",
                f"{elements - in_rows:,}",
                f"{(elements - in_rows) / total:.4%}",
                "-" if view is None else str(view),
                " ".join(shown) or "(none)",
            )
        )
        if in_rows:
            decay, share = f"{group.get('adamw_weight_decay', 0.0):g}", f"{in_rows / total:.4%}"
            lines.append(
                ("AdamW", decay, _rate(group, "adamw_lr"), "0", "0", f"{in_rows:,}", share, "-", "(rows of the line above)")
            )
    lines.append(("total", "", "", f"{num_tensors:,}", f"{num_entries:,}", f"{total:,}", f"{1:.4%}", "", ""))
    if all(line[7] in ("view", "-", "") for line in lines):
        lines = [(*line[:7], line[8]) for line in lines]
    return format_table(lines, right=range(1, 7))


def format_table(lines: Sequence[Sequence[str]], *, right: Container[int]) -> str:
    """Lines of cells as text, each column as wide as it needs; those in ``right`` are flush right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _rate(group: Mapping[str, Any], field: str) -> str:
    return "-" if group.get(field) is None else f"{float(group[field]):g}"


def _with_empty_decay_group(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    shown = list(groups)
    adamw = [position for position, group in enumerate(shown) if group["algorithm"] == "adamw"]
    if adamw and not any(group["weight_decay"] for group in groups if group["algorithm"] == "adamw"):
        empty = {"algorithm": "adamw", "weight_decay": shown[0]["weight_decay"], "params": [], "param_names": []}
        shown.insert(adamw[0], empty)
    return shown


def _further_names(model: nn.Module) -> dict[int, int]:
    """For each parameter the names beyond its first."""
    counts: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        counts[id(parameter)] = counts.get(id(parameter), -1) + 1
    return counts
