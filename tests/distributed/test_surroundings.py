"""What programs do around an optimizer: defaults and modes that they set, compiled code, process groups of their own."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import set_gradient, sharded, whole_tensors
from small_optimizer import assert_same, fill_gradients, small_optimizer, snapshot
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from omn_dist import DualOptimizer

pytestmark = pytest.mark.distributed


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(precision)
    yield
    torch.set_float32_matmul_precision("highest")


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "default dtype bfloat16": lambda: _default_dtype(torch.bfloat16),
    "default dtype float64": lambda: _default_dtype(torch.float64),
    "default device meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "deterministic algorithms": _deterministic,
    "matmul precision medium": lambda: _matmul_precision("medium"),
    "no oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),  # type: ignore[no-untyped-call]
}


def _steps_under(setting: str) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # 144 x 160 is large enough for every kernel, which are tried in the first step.
    weights = whole_tensors(((144, 160), (9, 5), (6, 8)), 0)
    found = {}
    for preset, fields in (("omn", {"form": "gram"}), ("torch", {"spectral_cap": 0.5}), ("normuon", {}), ("muonclip", {})):
        parameters = [sharded(weight, mesh) for weight in weights]
        groups = [{"params": parameters[:2], "algorithm": "muon", **fields}, {"params": parameters[2:], "algorithm": "adamw"}]
        with nullcontext() if setting == "inference mode" else SETTINGS[setting]():
            optimizer = DualOptimizer(groups, preset=preset)
        for step in range(3):
            for parameter, gradient in zip(parameters, whole_tensors([weight.shape for weight in weights], 1 + step), strict=True):
                set_gradient(parameter, gradient)
            if dist.get_rank() == step:
                parameters[0].grad = None
            with SETTINGS[setting]():
                optimizer.step()
        found |= {f"{preset}.{name}": tensor for name, tensor in snapshot(optimizer).items()}
    return found


@pytest.mark.parametrize("setting", list(SETTINGS)[1:])
def test_what_a_program_has_set_changes_no_bit(setting: str) -> None:
    (expected, _), (found, _) = (run_ranks(2, _steps_under, chosen) for chosen in ("nothing", setting))
    assert_same(expected, found)


def _compiled() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for compiled in (False, True):
        optimizer = small_optimizer(mesh)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for seed in range(3):
            fill_gradients(optimizer, seed)
            step()
        found.append(snapshot(optimizer))
    assert_same(*found)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_may_be_called_from_compiled_code(world_size: int) -> None:
    run_ranks(world_size, _compiled)


def _others_have_groups(mesh_first: bool) -> None:
    mesh = init_device_mesh("cpu", (3,)) if mesh_first else None
    # As for a log or a checkpoint of some ranks: rank 2 takes part in neither.
    dist.new_group([0, 1])
    dist.new_group([0])
    optimizer = small_optimizer(mesh or init_device_mesh("cpu", (3,)))
    fill_gradients(optimizer, 1)
    optimizer.step()


@pytest.mark.parametrize("mesh_first", [False, True])
def test_ranks_may_be_in_different_numbers_of_groups(mesh_first: bool) -> None:
    run_ranks(3, _others_have_groups, mesh_first)
