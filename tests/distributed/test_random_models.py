"""Models that nobody thought of: random parameters, layouts, recipes and steps give on ranks the bits of one process."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from references import local_of
from small_optimizer import snapshot
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from omn_dist import DualOptimizer
from omn_dist.algorithms import lists
from omn_dist.algorithms.coefficients import SCHEDULES
from omn_dist.optim.presets import PRESETS

NUM_MODELS = 30
NUM_STEPS = 3
REFUSALS = (ValueError, NotImplementedError)

Model = list[dict[str, Any]]
"""Parameter groups whose ``params`` are whole tensors."""


class Ways(NamedTuple):
    """What may not change a bit."""

    in_backward: bool
    """Directions leave during backward."""
    together: bool
    """Rectangles go together as on a GPU."""
    reloaded: bool
    """The state is saved and loaded between two steps."""


def _size(random: Random) -> int:
    return random.choice((0, 1, 2, 3, *range(4, 25), 128, 130)) if random.random() < 0.9 else random.randint(128, 200)


def _fields(random: Random, algorithm: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"lr": random.choice((0.01, 0.1)), "weight_decay": random.choice((0.0, 0.1))}
    if algorithm in ("muon", "normuon"):
        choices: dict[str, Sequence[Any]] = {
            "schedule": sorted(SCHEDULES),
            "nesterov": (False, True),
            "momentum_rule": ("sum", "ema"),
            "cautious_decay": (True,),
            "spectral_cap": (0.5, 1.0),
            "stable_rank_floor": (1.5, 2.0),
            "form": ("gram", "auto"),
            "newton_schulz": ("omn", "torch", "scaled"),
            "ns_dtype": ("float32", "bfloat16", "float16"),
        }
        fields |= {field: random.choice(values) for field, values in choices.items() if random.random() < 0.15}
    return fields


def _view(random: Random) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Fields of a view, and the shape that a parameter with it is stored in."""
    count, num_rows, num_columns = random.randint(1, 4), random.randint(2, 9), random.randint(1, 12)
    fields: dict[str, Any] = {"muon_shape": (count, num_rows, num_columns), "muon_transposed": random.random() < 0.3}
    if random.random() < 0.5:
        first = random.randint(1, num_rows - 1)
        fields["muon_split_sizes"] = (first, num_rows - first)
        fields["muon_split_algorithms"] = random.choice((("muon", "adamw"), ("adamw", "muon"), ("muon", "muon")))
    if random.random() < 0.3:
        fields["muon_joined_axes"] = (0,)
    if fields["muon_transposed"]:
        return fields, (num_columns, count * num_rows)
    return fields, random.choice(((count * num_rows, num_columns), (count, num_rows, num_columns)))


def _model(random: Random) -> tuple[Model, dict[str, Any]]:
    """Whole parameters in groups, and what the optimizer is told beside them."""
    groups = []
    for number in range(random.randint(1, 4)):
        algorithm = random.choice(("muon", "muon", "normuon", "vector", "adamw"))
        fields = _fields(random, algorithm)
        view, stored = _view(random) if algorithm in ("muon", "normuon") and random.random() < 0.3 else ({}, None)
        num_dims = {"vector": (1,), "adamw": (0, 1, 2, 3)}.get(algorithm, (2,))
        tensors = []
        for _ in range(random.randint(1, 4)):
            shape = stored or tuple(_size(random) for _ in range(random.choice(num_dims)))
            dtype = random.choice((*(torch.float32,) * 4, torch.bfloat16, torch.float16, torch.float64))
            tensors.append(_gaussian(random, shape, dtype))
        names = [f"{random.choice('abc')}.{number}.{index}" for index in range(len(tensors))]
        groups.append({"params": tensors, "param_names": names, "algorithm": algorithm, **fields, **view})
    options = {
        "preset": random.choice(sorted(PRESETS)),
        "wave_bytes": random.choice((None, 64, 300, 2000, 20_000)),
        "transport": random.choice(("all_to_all", "all_to_all", "all_gather")),
        "copies": random.choice(("share", "repeat")),
        "communication_dtype": random.choice(("auto", "float32", "bfloat16")),
        "master_weights": random.random() < 0.5,
    }
    return groups, options


def _gaussian(random: Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(random.randrange(2**31))).to(dtype)


def _elsewhere(random: Random, tensor: Tensor) -> Tensor:
    """The same numbers in other places of memory: side by side, column by column, or with gaps between rows."""
    way = random.randrange(3)
    if way == 0 or tensor.ndim < 2 or tensor.numel() == 0:
        return tensor
    if way == 1:
        return tensor.mT.contiguous().mT
    return torch.zeros(*tensor.shape[:-1], tensor.size(-1) + 3, dtype=tensor.dtype)[..., 1:-2].copy_(tensor)


def _placements(random: Random, tensor: Tensor, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Rows on most axes of the mesh, else columns or copies."""
    dims = [Shard(min(dim, tensor.ndim - 1)) if tensor.ndim else Replicate() for dim in (0, 0, 0, 1)]
    return tuple(random.choice((*dims, Replicate())) for _ in range(mesh.ndim))


def _parameter(random: Random, tensor: Tensor, mesh: DeviceMesh | None) -> nn.Parameter:
    placements = () if mesh is None else _placements(random, tensor, mesh)
    local = tensor if mesh is None else local_of(tensor, mesh, placements)
    # More dims have to be the rows of one matrix.
    local = _elsewhere(random, local) if tensor.ndim == 2 else local
    if mesh is None:
        return nn.Parameter(local)
    return nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()))


def _backward(random: Random, parameter: nn.Parameter, gradient: Tensor) -> None:
    if isinstance(parameter, DTensor):
        part = local_of(gradient, parameter.device_mesh, parameter.placements)
        torch.autograd.backward([parameter.to_local()], [_elsewhere(random, part)])
    else:
        torch.autograd.backward([parameter.view_as(parameter)], [_elsewhere(random, gradient)])


def _train(seed: int, mesh: DeviceMesh | None, ways: Ways) -> dict[str, Tensor]:
    """Whole weights and state at the end."""
    random, at_random = Random(f"model {seed}"), Random(f"layout {seed}")
    groups, options = _model(random)
    for group in groups:
        group["params"] = [_parameter(at_random, tensor, mesh) for tensor in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    with _rectangles_together(ways.together):
        optimizer = DualOptimizer(groups, **{"preset": "omn", **options})
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            scale = random.choice((1e-3, 1.0, 1e3))
            gradients = {
                parameter: _gaussian(random, parameter.shape, parameter.dtype) * scale
                for parameter in random.sample(parameters, len(parameters))
            }
            # The last one is there in any case: a step without a gradient is an error.
            missing = {parameter for parameter in list(gradients)[:-1] if random.random() < 0.1}
            early = ways.in_backward and options["transport"] == "all_to_all"
            with optimizer.overlap_backward() if early else nullcontext():
                for parameter, gradient in gradients.items():
                    if parameter not in missing:
                        _backward(at_random, parameter, gradient)
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
            if ways.reloaded and step == 0:
                optimizer.load_state_dict(optimizer.state_dict())
    return snapshot(optimizer)


@contextmanager
def _rectangles_together(forced: bool) -> Iterator[None]:
    with patch.object(lists, "uses_multi_tensor", lambda device: True) if forced else nullcontext():
        yield


def _result(seed: int, mesh: DeviceMesh | None, ways: Ways) -> dict[str, Tensor] | str:
    """What a model ends with, or the refusal."""
    try:
        return _train(seed, mesh, ways)
    except REFUSALS as refusal:
        return f"{type(refusal).__name__}: {refusal}"


def _compare(seeds: Sequence[int], mesh_shape: tuple[int, ...]) -> int:
    """How many of the models were compared; the others are refused."""
    warnings.simplefilter("ignore")
    logging.disable()
    mesh = init_device_mesh("cpu", mesh_shape)
    num_compared = 0
    for seed in seeds:
        random = Random(f"ways {seed}")
        ways = Ways(*(random.random() < 0.5 for _ in Ways._fields))
        expected, found = _result(seed, None, Ways(False, False, False)), _result(seed, mesh, ways)
        if isinstance(found, str):
            # What one process takes is refused on ranks only where a layout cannot be followed.
            assert isinstance(expected, str) or found.startswith("NotImplementedError"), (seed, ways, found)
            continue
        assert not isinstance(expected, str), (seed, ways, expected)
        num_compared += 1
        assert found.keys() == expected.keys(), (seed, ways)
        for name, tensor in found.items():
            assert tensor.dtype == expected[name].dtype, (seed, ways, name)
            assert torch.allclose(tensor, expected[name], rtol=0, atol=0, equal_nan=True), (seed, ways, name)
    return num_compared


@pytest.mark.distributed
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)], ids=str)
def test_random_models_are_bitwise_one_process(mesh_shape: tuple[int, ...]) -> None:
    seeds = range(NUM_MODELS * sum(mesh_shape), NUM_MODELS * (sum(mesh_shape) + 1))
    counts = run_ranks(torch.Size(mesh_shape).numel(), _compare, seeds, mesh_shape)
    assert min(counts) == max(counts) > NUM_MODELS // 2
