"""The shape of the package: what imports what, who knows the rules by name, and how large its parts are."""

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "omn_dist"
sys.path.insert(0, str(ROOT / "docs"))

from import_graph import BEGIN, END, PAGE, box_graph, circle, drawing, floors, is_one_file, module_graph  # noqa: E402

FLOORS = (
    ("__main__",),
    ("cli",),
    ("studies", "launch"),
    ("train",),
    ("__init__",),
    ("optim",),
    ("exchange", "models"),
    ("kernels", "roles"),
    ("plan",),
    ("algorithms",),
    ("settings",),
)
"""From the top down: a box imports only what stands below it."""
RULES = {"muon", "normuon", "vector", "adamw"}
FILES = sorted(PACKAGE.rglob("*.py"))
SOURCES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def _where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


# --- imports --------------------------------------------------------------------------------------


def test_no_imports_in_a_circle() -> None:
    modules = module_graph()
    assert circle(modules) == []
    for depth in (1, 2, 3):
        assert circle(box_graph(modules, depth)) == [], f"between boxes of depth {depth}"


def test_imports_run_downward_only() -> None:
    height = {box: -number for number, floor in enumerate(FLOORS) for box in floor}
    graph = box_graph(module_graph())
    assert graph.keys() == height.keys()
    upward = [(box, other) for box, others in graph.items() for other in others if height[other] >= height[box]]
    assert upward == []


def test_few_boxes_and_no_tower_of_single_files() -> None:
    graph = box_graph(module_graph())
    assert len(graph) < 18
    single = [len(floor) == 1 and is_one_file(floor[0]) and floor[0] != "__init__" for floor in floors(graph)]
    assert not any(all(single[start : start + 3]) for start in range(len(single) - 2))


def test_the_drawing_is_that_of_the_code() -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    found, _, _ = rest.partition(END)
    assert found.strip() == drawing(box_graph(module_graph())), "run: python docs/import_graph.py --write"


def test_only_exchange_talks_during_a_step() -> None:
    """Collectives are called in exchange, in construction (process groups), and by what is no step."""
    calls = {"all_to_all_single", "all_gather_single", "all_gather_into_tensor", "scatter", "all_reduce", "new_group"}
    outside = ("exchange", "train", "launch")
    found = [
        _where(path, node)
        for path, tree in SOURCES.items()
        if path.relative_to(PACKAGE).parts[0] not in outside
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in calls and isinstance(node.value, ast.Name) and node.value.id == "dist"
    ]
    # The maximum of attention logits over ranks, after a step; and measurements.
    assert {place.partition(":")[0] for place in found} == {"omn_dist/optim/qk_clip.py", "omn_dist/studies/calibration.py"}


# --- rules ----------------------------------------------------------------------------------------


def _names_a_rule(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(_names_a_rule(element) for element in node.elts)
    return isinstance(node, ast.Constant) and node.value in RULES


def _branches(tree: ast.AST) -> Iterator[ast.AST]:
    """Comparisons, patterns and look-ups with the name of a rule; type tests on the settings of one."""
    settings = ("MuonSettings", "MomentumSettings", "VectorSettings", "AdamWCoefficients")
    for node in ast.walk(tree):
        match node:
            case ast.Compare() if any(map(_names_a_rule, (node.left, *node.comparators))):
                yield node
            case ast.MatchValue() if _names_a_rule(node.value):
                yield node
            case ast.Call(func=ast.Attribute(attr="startswith")) if any(map(_names_a_rule, node.args)):
                yield node
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass")):
                if any(name in ast.dump(node.args[1]) for name in settings):
                    yield node


def test_nothing_outside_the_rules_asks_for_one_by_name() -> None:
    outside = {path: tree for path, tree in SOURCES.items() if PACKAGE / "optim" / "rules" not in path.parents}
    assert [_where(path, node) for path, tree in outside.items() for node in _branches(tree)] == []


@pytest.mark.parametrize(
    "code",
    [
        "group['algorithm'] == 'muon'",
        "algorithm in ('muon', 'x')",
        "isinstance(settings, NorMuonSettings)",
        "match name:\n    case 'adamw': pass",
        "name.startswith('normuon')",
    ],
)
def test_the_search_for_names_finds_them(code: str) -> None:
    assert list(_branches(ast.parse(code)))


# --- sizes and names ------------------------------------------------------------------------------


def test_files_are_small() -> None:
    num_lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert statistics.median(num_lines.values()) <= 118
    assert {str(path): count for path, count in num_lines.items() if count >= 450} == {}


def test_parameter_lists_are_short() -> None:
    """At most eight; ``self`` and ``cls`` do not count."""
    long = []
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                given = node.args
                names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                count = len(set(names) - {"self", "cls"}) + (given.vararg is not None) + (given.kwarg is not None)
                if count > 8:
                    long.append(f"{_where(path, node)} {node.name}: {count}")
    assert long == []


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(_where(path, node))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
