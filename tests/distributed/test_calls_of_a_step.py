"""How often a step calls: products by shapes, collectives by waves; on a GPU, launches by settings, and that it never waits."""

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from launches import Launches
from ranks import run_ranks
from references import set_gradient, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from omn_dist import DualOptimizer
from omn_dist.algorithms import lists
from omn_dist.optim.step import MatrixStep


class _Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*arguments, **(keywords or {}))

    @property
    def num_products(self) -> int:
        return sum(self.counts[name] for name in ("mm", "bmm", "addmm", "baddbmm"))


def _small_ones(num_matrices: int, batch_invariant: bool) -> tuple[int, int, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    parameters = [sharded(torch.randn(24, 64, generator=generator), mesh) for _ in range(num_matrices)]
    optimizer = DualOptimizer([{"params": parameters, "algorithm": "muon"}], preset="torch", batch_invariant=batch_invariant)
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    with _Calls() as calls:
        optimizer.step()
    (plan,) = optimizer.plans
    return calls.num_products, optimizer.num_collectives, len(plan.waves)


def test_small_matrices_of_one_shape_share_products_and_collectives() -> None:
    for num_products, num_collectives, num_waves in run_ranks(2, _small_ones, 74, False):
        assert num_waves == 1
        assert num_collectives == 2
        # Five steps of three products.
        assert num_products == 15
    for num_products, num_collectives, _ in run_ranks(2, _small_ones, 74, True):
        assert num_collectives == 2
        # One after the other, so that bits do not depend on owners.
        assert num_products == 15 * 74 // 2


def _launches_on_shards(num_matrices: int, preset: str, num_groups: int, some_absent: bool) -> tuple[Counter[str], int]:
    """Launches of prepare, commit and apply in a step whose rectangles go together as on a GPU, and how many waves it has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    parameters = [sharded(torch.randn(24, 64, generator=generator), mesh) for _ in range(num_matrices * num_groups)]
    groups = [
        {"params": parameters[number::num_groups], "algorithm": "muon", "momentum": 0.9 - 0.1 * number, "lr": 0.1 / (number + 1)}
        for number in range(num_groups)
    ]
    launches = Launches()

    def counted(method: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            with launches:
                return method(*arguments, **options)

        return call

    with ExitStack() as stack:
        stack.enter_context(patch.object(lists, "uses_multi_tensor", lambda device: True))
        for name in ("prepare", "commit", "apply"):
            stack.enter_context(patch.object(MatrixStep, name, counted(getattr(MatrixStep, name))))
        optimizer = DualOptimizer(groups, preset=preset, wave_bytes=2**24)
        for number, parameter in enumerate(parameters):
            set_gradient(parameter, torch.randn(24, 64, generator=generator))
            if some_absent and (number + dist.get_rank()) % 3 == 0:
                parameter.grad = None
        optimizer.step()
    (plan,) = optimizer.plans
    return launches.counts, len(plan.waves)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_launches_on_shards_are_by_settings(num_groups: int) -> None:
    for num_matrices in (6, 74):
        for launches, num_waves in run_ranks(2, _launches_on_shards, num_matrices, "torch", num_groups, False):
            assert num_waves == 1
            # Of what travels, and again of what is its own: momentum, Nesterov, cast; cast, decay, update.
            for_one = {"_foreach_lerp_": 2, "_foreach_lerp": 2, "_foreach_copy_": 4, "_foreach_mul_": 2, "_foreach_add_": 2}
            assert launches == {name: count * num_groups for name, count in for_one.items()}


@pytest.mark.parametrize("preset", ["torch", "omn", "normuon"])
def test_launches_do_not_grow_with_matrices_whose_gradients_are_absent(preset: str) -> None:
    few, many = (run_ranks(2, _launches_on_shards, num_matrices, preset, 1, True) for num_matrices in (12, 72))
    assert few == many
    for launches, _ in many:
        assert launches.total() < 72
        assert "_local_scalar_dense" not in launches, "the host must not wait for the device"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch says when the host waits for one")
def test_a_step_does_not_wait_for_the_device() -> None:
    parameters = [nn.Parameter(torch.randn(64, 96, device="cuda")) for _ in range(4)]
    groups = [{"params": parameters[:3], "algorithm": "muon"}, {"params": parameters[3:], "algorithm": "adamw"}]
    optimizer = DualOptimizer(groups, preset="torch")
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
