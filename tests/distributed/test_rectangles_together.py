"""Steps whose rectangles go together, as on a GPU: the bits of those that go one by one, whatever is in a wave."""

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import set_gradient, sharded, whole_tensors
from small_optimizer import fill_gradients, small_optimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from omn_dist import DualOptimizer
from omn_dist.algorithms import lists
from omn_dist.optim.step import MatrixStep

NUM_STEPS = 4
SHAPES = ((16, 8), (10, 6), (16, 8))
GROUPS: tuple[dict[str, Any], ...] = (
    {"algorithm": "muon"},
    {"algorithm": "muon", "momentum": 0.9, "momentum_rule": "sum", "nesterov": False, "weight_decay": 0.0},
    {"algorithm": "muon", "momentum_rule": "sum", "weight_decay": 0.3, "lr": 0.1, "cautious_decay": True},
    {"algorithm": "muon", "nesterov": False, "scale": "0.2*sqrt(max(m, n))", "dtype": torch.bfloat16},
    {"algorithm": "muon", "momentum_rule": "sum", "cautious_decay": True, "dtype": torch.bfloat16},
    {"algorithm": "normuon", "cautious_decay": True, "row_eps": 1e-3},
    {
        "algorithm": "normuon",
        "shapes": ((12, 20),) * 2,
        "muon_shape": (20, 12),
        "muon_split_sizes": (8, 7, 5),
        "muon_transposed": True,
    },
    {"algorithm": "normuon", "momentum_rule": "sum", "rescale": "|O|/|O^|", "cautious_decay": True, "dtype": torch.bfloat16},
)
"""Groups of a preset that differ in everything that shards are told; ``shapes`` and ``dtype`` are those of their parameters."""
VECTORS: tuple[dict[str, Any], ...] = (
    {"algorithm": "muon", "shapes": ((16, 8),) * 3},
    {"algorithm": "vector", "shapes": ((9,),) * 6, "segments": ((0, 4, 1.0, True), (4, 9, 2.0, False)), "weight_decay": 0.2},
    {"algorithm": "vector", "shapes": ((7,),) * 6, "momentum_rule": "sum", "dtype": torch.bfloat16},
)
"""Segments, each with a decay of its own, beside matrices."""


def _has_gradient(parameter: int, step: int) -> bool:
    """All at first, then on some ranks only, then on none of some parameters, then all."""
    if step == 1:
        return bool((parameter + dist.get_rank()) % 3)
    return step != 2 or parameter % 4 != 1


def _run(
    mesh: DeviceMesh, described: Sequence[Mapping[str, Any]], split: Placement, *, together: bool, **options: Any
) -> list[Tensor]:
    """Shards of weights and state after every step."""
    groups, weights = [], []
    for number, group in enumerate(described):
        fields = dict(group)
        shapes, dtype = fields.pop("shapes", SHAPES), fields.pop("dtype", torch.float32)
        tensors = [tensor.to(dtype) for tensor in whole_tensors(shapes, number)]
        placements = [split if len(shape) > 1 or split.is_replicate() else Shard(0) for shape in shapes]
        groups.append({"params": [sharded(t, mesh, [p]) for t, p in zip(tensors, placements, strict=True)], **fields})
        weights += groups[-1]["params"]
    found = []
    with warnings.catch_warnings(), patch.object(lists, "uses_multi_tensor", lambda device: together):
        warnings.simplefilter("ignore")
        optimizer = DualOptimizer(groups, preset="torch", wave_bytes=2**20, **options)
        assert len(optimizer.plans[0].waves) == 1
        for step in range(NUM_STEPS):
            gradients = whole_tensors([tuple(weight.shape) for weight in weights], 100 + step)
            for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
                set_gradient(weight, gradient.to(weight.dtype))
                if not _has_gradient(number, step):
                    weight.grad = None
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            with patch.object(MatrixStep, "_apply", autospec=True, side_effect=MatrixStep._apply) as spied:
                optimizer.step()
            assert any(len(call.args[2]) > 1 for call in spied.call_args_list) == together
            found += [_local(tensor) for weight in weights for tensor in (weight, *optimizer.state[weight].values())]
    return found


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], what: Any) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.isfinite().all()
        assert torch.equal(one, other), f"{what}: tensor {index} of shape {tuple(one.shape)} differs"


def _every_way() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cases = [(GROUPS, Shard(0)), (GROUPS, Shard(1)), (GROUPS, Replicate()), (VECTORS, Shard(0))]
    for (groups, split), wire, master_weights in itertools.product(cases, ("float32", "bfloat16"), (False, True)):
        options = {"communication_dtype": wire, "master_weights": master_weights}
        expected = _run(mesh, groups, split, together=False, **options)
        _assert_same(_run(mesh, groups, split, together=True, **options), expected, (groups[-1]["algorithm"], split, options))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bits_are_those_of_one_by_one(world_size: int) -> None:
    run_ranks(world_size, _every_way)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: its kernels are other ones"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("preset", ["torch", "omn", "normuon"])
def test_bits_on_a_device(device: str, preset: str) -> None:
    weights = {}
    for together in (False, True):
        parameters = [nn.Parameter(tensor.to(device)) for tensor in whole_tensors(SHAPES, 0)]
        groups = [{"params": parameters, "algorithm": "muon", "weight_decay": 0.1}]
        with patch.object(lists, "uses_multi_tensor", lambda device, together=together: together):
            optimizer = DualOptimizer(groups, preset=preset)
            for step in range(3):
                for parameter, gradient in zip(parameters, whole_tensors(SHAPES, 1 + step), strict=True):
                    parameter.grad = gradient.to(device)
                optimizer.step()
        weights[together] = [parameter.detach().cpu() for parameter in parameters]
    _assert_same(weights[True], weights[False], preset)


def _without_gradients_on(ranks: Sequence[int]) -> bool:
    """Whether a rank knows after a step that there was a gradient."""
    optimizer = small_optimizer(init_device_mesh("cpu", (dist.get_world_size(),)))
    fill_gradients(optimizer, 0)
    if dist.get_rank() in ranks:
        optimizer.zero_grad()
    with patch.object(lists, "uses_multi_tensor", lambda device: True):
        optimizer.step()
    return optimizer._saw_gradient


def test_a_rank_without_any_gradient_hears_of_those_of_others() -> None:
    assert run_ranks(2, _without_gradients_on, [1]) == [True, True]
    assert run_ranks(2, _without_gradients_on, [0, 1]) == [False, False]
