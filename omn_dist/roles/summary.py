"""The table of groups that a run prints before its first step."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def format_groups(groups: Sequence[Mapping[str, Any]], model: nn.Module | None = None) -> str:
    """A table of the groups: algorithm, decay, learning rate, tensors, elements, share and the ends of the list of names.

    Args:
        groups: of ``build_parameter_groups``, or ``param_groups`` of an optimizer (then with learning rates).
        model: where given, further names of tied weights are counted as entries, as a ``state_dict`` does.

    The decaying AdamW group is shown even when it is empty, so that nobody has to wonder.
    """
    further = _further_names(model) if model is not None else {}
    lines = [("algorithm", "decay", "lr", "tensors", "entries", "elements", "share", "names")]
    total = sum(parameter.numel() for group in groups for parameter in group["params"])
    num_tensors = num_entries = 0
    for group in _with_empty_decay_group(groups):
        parameters, names = group["params"], group["param_names"]
        elements = sum(parameter.numel() for parameter in parameters)
        entries = len(names) + sum(further.get(id(parameter), 0) for parameter in parameters)
        num_tensors, num_entries = num_tensors + len(names), num_entries + entries
        lr = group.get("lr")
        shown = names if len(names) <= 2 else [names[0], "...", names[-1]]
        lines.append(
            (
                {"muon": "Muon", "normuon": "NorMuon", "adamw": "AdamW"}.get(group["algorithm"], group["algorithm"]),
                f"{group['weight_decay']:g}",
                "-" if lr is None else f"{float(lr):g}",
                f"{len(names):,}",
                f"{entries:,}",
                f"{elements:,}",
                f"{elements / total:.4%}",
                " ".join(shown) or "(none)",
            )
        )
    lines.append(("total", "", "", f"{num_tensors:,}", f"{num_entries:,}", f"{total:,}", f"{1:.4%}", ""))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 1 <= column <= 6 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


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
