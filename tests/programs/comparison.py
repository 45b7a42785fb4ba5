"""Runs a program on ranks and in one process, and says where they differ."""

import ast
import functools
import inspect
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from expectation import MASTER, Expectation
from machine import Machine, tensors_of
from program import Operation, Program
from tensors import part_of
from torch import Tensor
from torch.distributed.tensor import DTensor

import omn_dist

Result = TypeVar("Result")

_OWN = Path(omn_dist.__file__).parent
_NOT_COMPARED = ("params", "differentiable")
"""Fields of groups: torch gives the second one to groups that are added to a copy of an optimizer."""
_TORCH_OPTIMIZER = Path(inspect.getfile(torch.optim.Optimizer))


class Report(NamedTuple):
    """What one rank says about one program."""

    troubles: tuple[str, ...]
    """The first difference, or the foreign error; empty when all is well."""
    num_operations: int
    """How many were compared; fewer than the program has where a layout is refused."""
    num_errors: int
    """How many operations ended in the same error on ranks and in one process."""


def run_program(program: Program, world_size: int) -> Report:
    """The program on this rank and, beside it, as one process. Collective.

    After a difference the program goes on, since the other ranks may not see it. After an error that
    is no refusal it ends.
    """
    warnings.simplefilter("ignore")
    logging.disable()
    troubles: list[str] = []
    num_errors = 0
    try:
        reference, machine = _attempt(lambda: Machine(program, None)), _attempt(lambda: Machine(program, world_size))
        if isinstance(reference, str) or isinstance(machine, str):
            texts = [one if isinstance(one, str) else "" for one in (reference, machine)]
            alike = _gist(texts[0]) == _gist(texts[1]) or (not texts[0] and _is_refused_layout(texts[1]))
            return Report(() if alike else (f"construction: one process had {texts[0] or 'no error'}, this rank {texts[1]}",), 0, 1)
        reference.sharded = machine
        for number, operation in enumerate(program.operations):
            where = f"operation {number}, {operation}"
            expected, wrong = _in_one_process(reference, operation)
            troubles += [f"{where}, in one process: {text}" for text in wrong]
            found = _attempt(partial(_call, machine, operation))
            if found is not None and expected is None and _is_refused_layout(found):
                return Report(tuple(troubles[:1]), number, num_errors)
            if _gist(found or "") != _gist(expected or ""):
                troubles.append(f"{where}: one process had {expected or 'no error'}, this rank {found or 'no error'}")
                if found is not None:
                    break
            num_errors += found is not None
            troubles += [f"{where}: {text}" for text in _differences(reference, machine)[:1]]
    except Exception as error:
        troubles.append(f"foreign error: {_where_from(error)}")
    finally:
        if any(operation.name == "compile" for operation in program.operations):
            torch.compiler.reset()
    return Report(tuple(troubles[:1]), len(program.operations), num_errors)


def _call(machine: Machine, operation: Operation) -> None:
    getattr(machine, operation.name)(**operation.arguments)


def _in_one_process(reference: Machine, operation: Operation) -> tuple[str | None, list[str]]:
    """The error of an operation, and what it did wrong."""
    before = {name: tensor.clone() for name, tensor in tensors_of(reference)}
    # What the step has to give is known before it.
    expectation = Expectation(reference) if operation.name == "step" else None
    error = _attempt(partial(_call, reference, operation))
    if error is not None:
        after = dict(tensors_of(reference))
        changed = [name for name, tensor in before.items() if name not in after or not same(tensor, after[name])]
        return error, [f"an error changed {changed[0]}: {error}"] if changed else []
    return None, [] if expectation is None else expectation.differences(reference)


def _attempt(call: Callable[[], Result]) -> Result | str:
    """What a call returns; the text of an error that a check of the package raised. Other errors go on."""
    try:
        return call()
    except Exception as error:
        if not _is_own(error):
            raise
        return f"{type(error).__name__}: {error}"


def _where_from(error: BaseException) -> str:
    frames = [f"  {frame.filename}:{frame.lineno} {frame.line}" for frame in traceback.extract_tb(error.__traceback__)]
    return "\n".join([f"{type(error).__name__}: {error}", *frames[-8:]])


def _is_own(error: BaseException) -> bool:
    """Whether a ``raise`` of the package, or one of torch's base class of optimizers, made the error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(frame.filename)
    return (path.is_relative_to(_OWN) or path == _TORCH_OPTIMIZER) and frame.lineno in _raising_lines(path)


@functools.cache
def _raising_lines(path: Path) -> frozenset[int]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    raising = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    return frozenset(line for node in raising for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _is_refused_layout(error: str) -> bool:
    """What one process takes is refused on ranks only where a layout cannot be followed."""
    return error.startswith("NotImplementedError")


def _gist(error: str) -> tuple[str, ...]:
    """Type and the parameters that a message names: sizes and placements differ between ranks."""
    return error.partition(":")[0], *re.findall(r"blocks\.\d+\.w\d+", error)[:1]


def _differences(reference: Machine, machine: Machine) -> list[str]:
    """Between whole tensors and this rank's parts. Not collective."""
    found, expected = dict(tensors_of(machine)), dict(tensors_of(reference))
    left_out = {f"{name}.grad" for name in machine.absent}
    if different := (found.keys() ^ expected.keys()) - left_out:
        name = min(different)
        return [f"{name} is there {'on this rank' if name in found else 'in one process'} only"]
    texts = []
    for name in found.keys() - left_out:
        wanted = part_of(found[name], expected[name])
        local = found[name].to_local() if isinstance(found[name], DTensor) else found[name]
        if local.dtype != wanted.dtype or local.shape != wanted.shape:
            texts.append(f"{name} is {local.dtype} {tuple(local.shape)}, in one process {wanted.dtype} {tuple(wanted.shape)}")
        elif not same(local, wanted) and not _has_followed(name, found) and not _has_followed(name, expected):
            texts.append(f"{name} differs by {float((local.double() - wanted.double()).abs().max()):.3g}")
    for number, groups in enumerate(zip(machine.optimizer.param_groups, reference.optimizer.param_groups, strict=True)):
        ours, theirs = ({field: str(value) for field, value in group.items() if field not in _NOT_COMPARED} for group in groups)
        texts += [
            f"{field} of group {number} is {ours.get(field)}, in one process {theirs.get(field)}"
            for field in sorted(ours.keys() | theirs.keys())
            if ours.get(field) != theirs.get(field)
        ]
    return sorted(texts)


def _has_followed(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a tensor is a master that has the weights which somebody wrote.

    It follows them at the next step, or before it where the optimizer looks at its state: these may
    be other operations on ranks.
    """
    weight = tensors.get(name.removesuffix(f".{MASTER}"))
    if weight is None or not name.endswith(f".{MASTER}"):
        return False
    master, written = (one.to_local() if isinstance(one, DTensor) else one for one in (tensors[name], weight))
    return torch.equal(master.to(written.dtype), written)


def same(first: Tensor, second: Tensor) -> bool:
    """Equal bits, signs of zeros among them; any nan equals any other."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    signs = torch.equal(torch.signbit(first), torch.signbit(second)) or bool(first.isnan().any())
    return signs and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
