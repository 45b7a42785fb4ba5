"""How often a step calls: products by shapes, collectives by waves; and on a GPU, that it never waits for the device."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from omn_dist import DualOptimizer


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


def _small_ones(num_matrices: int, deterministic: bool) -> tuple[int, int, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    parameters = [sharded(torch.randn(24, 64, generator=generator), mesh) for _ in range(num_matrices)]
    optimizer = DualOptimizer([{"params": parameters, "algorithm": "muon"}], preset="torch", deterministic=deterministic)
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
