"""Private names of torch: each in one module, with its reason beside it, and still there."""

import ast
from collections.abc import Iterator
from pathlib import Path

import torch
import torch._compile
import torch.distributed.distributed_c10d
import torch.distributed.tensor.placement_types

PACKAGE = Path(__file__).parents[2] / "omn_dist"
SEEN_IN = ("2.9", "2.13")
"""Versions of torch in which all of them were seen."""
WHERE = {
    "_world": "exchange/process_groups.py",
    "_disable_dynamo": "optim/optimizer.py",
    "_assert_async": "optim/overlap.py",
    "_version": "optim/overlap.py",
    "_StridedShard": "plan/geometry/placement.py",
}
"""Multi-tensor operations, ``torch._foreach_*``, are not among them: they are in torch's reference and
have no other name."""


def _private_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What starts with an underscore among names from torch and attributes of tensors, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((part, node.lineno) for part in parts if part.startswith("_") and part != "_compile")
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            of_torch = owner.split(".")[0] in ("torch", "dist", "nn") and not node.attr.startswith("_foreach_")
            if of_torch or (node.attr in WHERE and owner not in ("self", "shard")):
                yield node.attr, node.lineno


def test_each_stands_in_one_module_with_its_reason() -> None:
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for name, line in _private_names(ast.parse("\n".join(lines))):
            found.setdefault(name, set()).add(str(path.relative_to(PACKAGE)))
            assert any("Private:" in above for above in lines[max(0, line - 6) : line]), f"{path}:{line}: no reason for {name}"
    assert found == {name: {place} for name, place in WHERE.items()}


def test_they_are_there() -> None:
    version = torch.__version__
    assert hasattr(torch.distributed.distributed_c10d._world, "pg_names"), version
    assert callable(torch._compile._disable_dynamo), version
    assert callable(torch._assert_async), version
    assert torch.ones(1).add_(1)._version == 1, version
    strided = torch.distributed.tensor.placement_types._StridedShard(0, split_factor=2)
    assert (strided.dim, strided.split_factor) == (0, 2), version
