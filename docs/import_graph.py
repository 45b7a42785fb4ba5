"""Draws which part of the package imports which, from the source.

    python docs/import_graph.py [--write]

Prints the layers of the package (its floors) as a table, and a Mermaid diagram. ``--write`` puts
both into docs/architecture.md, between the two markers. Reads the imports of the source and runs
none of it.
"""

import argparse
import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "omn_dist"
PAGE = Path(__file__).parent / "architecture.md"
BEGIN, END = "<!-- import graph: begin -->", "<!-- import graph: end -->"

Graph = dict[str, set[str]]
"""From each name to the names that it imports."""


def module_graph(package: Path = PACKAGE) -> Graph:
    """Imports between the modules of the package, those inside functions among them."""
    modules = {_module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    graph: Graph = {}
    for name, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        graph[name] = {found for node in ast.walk(tree) for found in _imported(node, modules)} - {name}
    return graph


def box_graph(modules: Mapping[str, set[str]], depth: int = 1) -> Graph:
    """Imports between boxes: folders and files ``depth`` levels below the package."""
    graph: Graph = {}
    for name, imported in modules.items():
        box = _box(name, depth)
        graph.setdefault(box, set()).update(_box(other, depth) for other in imported)
    return {box: others - {box} for box, others in graph.items()}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Names that import each other in a circle, or none."""
    left = {name: set(others) for name, others in graph.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def floors(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Boxes by height, from the ground up: a box stands above everything that it imports."""
    if found := circle(graph):
        raise ValueError(f"imports in a circle, expected none: {', '.join(found)}")
    height: dict[str, int] = {}
    while len(height) < len(graph):
        for name, others in graph.items():
            if name not in height and others <= height.keys():
                height[name] = 1 + max((height[other] for other in others), default=-1)
    return [sorted(name for name in graph if height[name] == level) for level in range(max(height.values()) + 1)]


def is_one_file(box: str, package: Path = PACKAGE) -> bool:
    """Whether a box is a single file."""
    return not (package / box.replace(".", "/")).is_dir()


def drawing(graph: Mapping[str, set[str]]) -> str:
    """The floors from the top down, and the diagram, as Markdown."""
    lines = ["| floor | |", "|---|---|"]
    levels = floors(graph)
    for number, level in reversed(list(enumerate(levels, start=1))):
        lines.append(f"| {number} | {', '.join(f'`{box}`' for box in level)} |")
    lines += ["", "```mermaid", "graph TD"]
    for box in sorted(graph):
        lines += [f"    {box} --> {other}" for other in sorted(_direct(graph, box))]
    return "\n".join([*lines, "```"])


def _direct(graph: Mapping[str, set[str]], box: str) -> set[str]:
    """What a box imports, without what it reaches through others anyway."""
    others = graph[box]
    return {other for other in others if not any(other in _reached(graph, via) for via in others - {other})}


def _reached(graph: Mapping[str, set[str]], box: str) -> set[str]:
    found: set[str] = set()
    left = [box]
    while left:
        for other in graph[left.pop()] - found:
            found.add(other)
            left.append(other)
    return found


def _module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(node: ast.AST, modules: Mapping[str, Path]) -> Sequence[str]:
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        below = [f"{node.module}.{alias.name}" for alias in node.names]
        found = [name for name in below if name in modules]
        return found if len(found) == len(below) or node.module not in modules else [*found, node.module]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in modules]
    return []


def _box(name: str, depth: int) -> str:
    parts = name.split(".")[1 : depth + 1]
    return ".".join(parts) or "__init__"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the drawing into docs/architecture.md")
    text = drawing(box_graph(module_graph()))
    if not parser.parse_args().write:
        print(text)
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
