"""Routes for people and for programs: tables, one JSON object a parameter, a picture."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omn_dist.roles.role import Role, Route
from omn_dist.roles.summary import format_table

ALGORITHM_NAMES = {"muon": "Muon", "adamw": "AdamW"}


def format_routes(routes: Sequence[Route]) -> str:
    """A table by role, algorithm and view: tensors, matrices, elements and share.

    Rows that AdamW updates inside a matrix parameter have a line of their own, which counts no tensor.
    """
    total = sum(route.num_elements for route in routes)
    counts: dict[tuple[str, str, str, str], list[int]] = {}

    def count(role: str, algorithm: str, has_decay: bool, view: str, tensors: int, matrices: int, elements: int) -> None:
        key = (role, ALGORITHM_NAMES[algorithm], "yes" if has_decay else "no", view)
        found = counts.setdefault(key, [0, 0, 0])
        for position, number in enumerate((tensors, matrices, elements)):
            found[position] += number

    for route in routes:
        view = "-" if route.view is None else str(route.view)
        in_rows = route.num_adamw_elements if route.algorithm != "adamw" else 0
        count(route.role, route.algorithm, route.has_decay, view, 1, route.num_matrices, route.num_elements - in_rows)
        if in_rows:
            count("gate", "adamw", True, f"rows of {view}", 0, 0, in_rows)
    lines = [("role", "algorithm", "decays", "tensors", "matrices", "elements", "share", "view")]
    for (role, algorithm, decays, view), (tensors, matrices, elements) in counts.items():
        lines.append((role, algorithm, decays, f"{tensors:,}", f"{matrices:,}", f"{elements:,}", f"{elements / total:.4%}", view))
    tensors, matrices, elements = (sum(numbers[position] for numbers in counts.values()) for position in range(3))
    lines.append(("total", "", "", f"{tensors:,}", f"{matrices:,}", f"{elements:,}", f"{1:.4%}", ""))
    return format_table(lines, right=range(3, 7))


def format_all(routes: Sequence[Route]) -> str:
    """A table with every parameter and the reason of its route."""
    lines = [("name", "shape", "role", "algorithm", "view", "reason")]
    for route in routes:
        shape, view = " x ".join(map(str, route.shape)), "-" if route.view is None else str(route.view)
        lines.append((route.name, shape, route.role, ALGORITHM_NAMES[route.algorithm], view, route.reason))
    return format_table(lines, right=())


def json_lines(routes: Sequence[Route]) -> Iterator[str]:
    """One JSON object a parameter: name, shape, role, algorithm, view (fields of a group, or null), reason."""
    for route in routes:
        view: dict[str, Any] | None = None if route.view is None else route.view.as_fields()
        yield json.dumps(
            {
                "name": route.name,
                "shape": route.shape,
                "role": route.role,
                "algorithm": route.algorithm,
                "view": view,
                "reason": route.reason,
            }
        )


def draw_routes(routes: Sequence[Route], path: Path) -> bool:
    """Draw the elements of each role, by algorithm, into a PNG or SVG (by the suffix of ``path``).

    Returns:
        False where matplotlib is not installed; nothing is written then.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    on_muon: dict[Role, int] = {}
    on_adamw: dict[Role, int] = {}
    for route in routes:
        on_muon[route.role] = on_muon.get(route.role, 0) + route.num_elements - route.num_adamw_elements
        on_adamw[route.role] = on_adamw.get(route.role, 0) + route.num_adamw_elements
    roles = sorted(on_muon, key=lambda role: (on_muon[role] + on_adamw[role], role))
    total = sum(route.num_elements for route in routes)
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(roles)), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.barh(roles, [on_muon[role] for role in roles], label="Muon")
    axes.barh(roles, [on_adamw[role] for role in roles], left=[on_muon[role] for role in roles], label="AdamW")
    for position, role in enumerate(roles):
        elements = on_muon[role] + on_adamw[role]
        axes.text(elements, position, f" {elements:,} ({elements / total:.2%})", va="center", fontsize=8)
    axes.margins(x=0.3)
    axes.set_xlabel("elements")
    axes.legend(loc="lower right")
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format=path.suffix.removeprefix(".").lower())
    partial.replace(path)
    return True
