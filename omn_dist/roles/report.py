"""Routes as tables, as one JSON object a parameter, and as a picture."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omn_dist.roles.algorithms import FOR_MATRICES, FOR_OTHERS, algorithm_kind
from omn_dist.roles.role import Role, Route
from omn_dist.roles.summary import align_columns


def format_routes(routes: Sequence[Route]) -> str:
    """A table by role, algorithm and view: numbers of tensors, matrices and elements, and shares.

    Rows of a matrix parameter that AdamW updates have a line of their own, which counts no tensor.
    """
    total = sum(route.num_elements for route in routes)
    counts: dict[tuple[str, str, str, str], list[int]] = {}

    def count(role: str, algorithm: str, has_decay: bool, view: str, tensors: int, matrices: int, elements: int) -> None:
        key = (role, algorithm_kind(algorithm).label, "yes" if has_decay else "no", view)
        found = counts.setdefault(key, [0, 0, 0])
        for position, number in enumerate((tensors, matrices, elements)):
            found[position] += number

    for route in routes:
        view = "-" if route.view is None else str(route.view)
        in_rows = route.num_adamw_row_elements
        count(route.role, route.algorithm, route.has_decay, view, 1, route.num_matrices, route.num_elements - in_rows)
        if in_rows:
            count("gate", FOR_OTHERS, True, f"rows of {view}", 0, 0, in_rows)
    lines = [("role", "algorithm", "decays", "tensors", "matrices", "elements", "share", "view")]
    for (role, algorithm, decays, view), (tensors, matrices, elements) in counts.items():
        lines.append((role, algorithm, decays, f"{tensors:,}", f"{matrices:,}", f"{elements:,}", f"{elements / total:.4%}", view))
    tensors, matrices, elements = (sum(numbers[position] for numbers in counts.values()) for position in range(3))
    lines.append(("total", "", "", f"{tensors:,}", f"{matrices:,}", f"{elements:,}", f"{1:.4%}", ""))
    return align_columns(lines, right=range(3, 7))


def format_all(routes: Sequence[Route]) -> str:
    """A table of all parameters, each with the reason of its route."""
    lines = [("name", "shape", "role", "algorithm", "view", "reason")]
    for route in routes:
        shape, view = " x ".join(map(str, route.shape)), "-" if route.view is None else str(route.view)
        lines.append((route.name, shape, route.role, algorithm_kind(route.algorithm).label, view, route.reason))
    return align_columns(lines, right=())


def json_lines(routes: Sequence[Route]) -> Iterator[str]:
    """One JSON object a parameter: name, shape, role, algorithm, view and reason.

    ``view`` has the fields of a parameter group, or is null.
    """
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
        False, without a file, if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    roles, by_algorithm = _elements(routes)
    total = sum(route.num_elements for route in routes)
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(roles)), dpi=120, layout="constrained")
    axes = figure.subplots()
    lengths = dict.fromkeys(roles, 0)
    for algorithm, elements in by_algorithm.items():
        widths = [elements.get(role, 0) for role in roles]
        axes.barh(roles, widths, left=list(lengths.values()), label=algorithm_kind(algorithm).label)
        lengths = {role: lengths[role] + width for role, width in zip(roles, widths, strict=True)}
    for position, length in enumerate(lengths.values()):
        axes.text(length, position, f" {length:,} ({length / total:.2%})", va="center", fontsize=8)
    axes.margins(x=0.3)
    axes.set_xlabel("elements")
    axes.legend(loc="lower right")
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format=path.suffix.removeprefix(".").lower())
    partial.replace(path)
    return True


def _elements(routes: Sequence[Route]) -> tuple[list[Role], dict[str, dict[Role, int]]]:
    """The roles, smallest first, and the elements that each algorithm updates, by role."""
    by_algorithm: dict[str, dict[Role, int]] = {FOR_MATRICES: {}, FOR_OTHERS: {}}
    by_role: dict[Role, int] = {}
    for route in routes:
        in_rows = route.num_adamw_row_elements
        for algorithm, elements in ((route.algorithm, route.num_elements - in_rows), (FOR_OTHERS, in_rows)):
            counts = by_algorithm.setdefault(algorithm, {})
            counts[route.role] = counts.get(route.role, 0) + elements
        by_role[route.role] = by_role.get(route.role, 0) + route.num_elements
    return sorted(by_role, key=lambda role: (by_role[role], role)), by_algorithm
