"""A small optimizer of three matrices and two AdamW parameters, plain or sharded, and what its tests do with it."""

from typing import Any

import torch
from references import set_gradient, sharded, whole, whole_tensors
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from omn_dist import DualOptimizer

SHAPES = ((16, 8), (5, 6), (3, 8))


def small_optimizer(mesh: DeviceMesh | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> DualOptimizer:
    matrices = [sharded(tensor.to(dtype), mesh) for tensor in whole_tensors(SHAPES, 0)]
    vectors = [sharded(tensor.to(dtype), mesh) for tensor in whole_tensors(((9,), (4, 4)), 1)]
    return DualOptimizer(
        [
            {"params": matrices, "algorithm": "muon", "param_names": ["a", "b", "c"]},
            {"params": vectors, "algorithm": "adamw", "param_names": ["d", "e"]},
        ],
        **{"preset": "omn", **options},
    )


def parameters_of(optimizer: DualOptimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def fill_gradients(optimizer: DualOptimizer, seed: int, scale: float = 1.0) -> None:
    parameters = parameters_of(optimizer)
    shapes = [tuple(parameter.shape) for parameter in parameters]
    for parameter, gradient in zip(parameters, whole_tensors(shapes, seed), strict=True):
        set_gradient(parameter, gradient.to(parameter.dtype) * scale)


def snapshot(optimizer: DualOptimizer) -> dict[str, Tensor]:
    found = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            found[name] = whole(parameter)
            for key, value in optimizer.state[parameter].items():
                found[f"{name}.{key}"] = whole(value)
    return found


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], but: tuple[str, ...] = ()) -> None:
    assert first.keys() == second.keys()
    for name in first:
        if not name.startswith(but) or not but:
            assert torch.equal(first[name], second[name]), name
            assert first[name].dtype == second[name].dtype, name
