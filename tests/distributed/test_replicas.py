"""Copies of parameters on several ranks: unequal ones are found, at construction and on request."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import sharded, whole_tensors
from small_optimizer import fill_gradients, parameters_of, small_optimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from omn_dist import DualOptimizer
from omn_dist.plan.geometry.placement import local_tensor

pytestmark = pytest.mark.distributed

LAYOUTS = ("ddp", "hsdp", "replicated")


def _flip_a_bit(tensor: Tensor, place: int = -1) -> None:
    local_tensor(tensor).detach().view(-1)[place : place + 1 if place + 1 else None].view(torch.int32).bitwise_xor_(1)


def _parameters(layout: str) -> list[nn.Parameter]:
    """Matrix, matrix, vector; ``hsdp`` has copies on ranks 0, 2 and 1, 3."""
    whole = whole_tensors(((16, 8), (6, 8), (9,)), 0)
    if layout == "ddp":
        return [nn.Parameter(tensor) for tensor in whole]
    if layout == "replicated":
        return [sharded(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()]) for tensor in whole]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return [sharded(tensor, mesh, [Replicate(), Shard(0)]) for tensor in whole]


def _built(layout: str, parameters: list[nn.Parameter], **options: Any) -> tuple[DualOptimizer, list[str]]:
    """An optimizer and the warnings about copies that its construction made."""
    groups = [
        {"params": parameters[:2], "param_names": ["a", "b"], "algorithm": "muon"},
        {"params": parameters[2:], "param_names": ["c"], "algorithm": "adamw"},
    ]
    if layout == "ddp":
        options["process_group"] = dist.group.WORLD
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = DualOptimizer(groups, **options)
    return optimizer, [str(warning.message) for warning in caught if "copies" in str(warning.message)]


def _raised(call: Callable[[], None]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def _at_construction(layout: str) -> list[list[str]]:
    parameters = _parameters(layout)
    _, of_equal = _built(layout, parameters)
    if dist.get_rank() == dist.get_world_size() - 1:
        _flip_a_bit(parameters[1])
        _flip_a_bit(parameters[2])
    _, of_unequal = _built(layout, parameters)
    _, unverified = _built(layout, parameters, verify_replicas=False)
    return [of_equal, of_unequal, unverified]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_construction_warns_on_all_ranks(layout: str) -> None:
    world_size = 4 if layout == "hsdp" else 3
    ranks = "1 and 3" if layout == "hsdp" else "0 and 2"
    for of_equal, of_unequal, unverified in run_ranks(world_size, _at_construction, layout):
        assert of_equal == unverified == []
        (message,) = of_unequal
        assert message.startswith(f"parameter b: ranks {ranks} hold different copies, expected equal ones (2 of 3 tensors differ)")
        assert "broadcast" in message
        assert "verify_replicas=False" in message


def _on_request(layout: str) -> list[str]:
    optimizer, _ = _built(layout, _parameters(layout))
    found = []
    for step in range(3):
        fill_gradients(optimizer, step)
        optimizer.step()
        found.append(_raised(optimizer.check_replicas))
    copied = copy.deepcopy(optimizer)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    first, _, vector = parameters_of(optimizer)
    if is_last:
        _flip_a_bit(optimizer.state[vector]["exp_avg_sq"])
    found.append(_raised(optimizer.check_replicas))
    if is_last:
        _flip_a_bit(optimizer.state[first]["momentum_buffer"], 0)
    found.append(_raised(optimizer.check_replicas))
    if is_last:
        _flip_a_bit(vector)
    found.append(_raised(optimizer.check_replicas))
    found.append(_raised(copied.check_replicas))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_and_state_are_compared_at_any_step(layout: str) -> None:
    results = run_ranks(4 if layout == "hsdp" else 2, _on_request, layout)
    assert all(found == results[0] for found in results), "the same on all ranks"
    *equal, second_moment, momentum, parameter, copied = results[0]
    assert [*equal, copied] == ["", "", "", ""]
    assert second_moment.startswith("state 'exp_avg_sq' of parameter c: ranks ")
    assert momentum.startswith("state 'momentum_buffer' of parameter a: ranks ")
    assert parameter.startswith("parameter c: ranks ")


def _state_of_one_rank() -> str:
    optimizer, _ = _built("ddp", _parameters("ddp"))
    if dist.get_rank() == 1:
        del optimizer.state[parameters_of(optimizer)[0]]["momentum_buffer"]
    return _raised(optimizer.check_replicas)


def test_state_that_one_rank_lacks_is_named() -> None:
    messages = run_ranks(2, _state_of_one_rank)
    assert messages[0] == messages[1]
    assert "rank 0 has state 'momentum_buffer' of parameter a" in messages[0]


def _swapped() -> list[str]:
    # Equal shapes and no names: only the bits show the order.
    tensors = whole_tensors(((4, 4), (4, 4), (4, 4)), 0)
    order = (0, 1, 2) if dist.get_rank() == 0 else (0, 2, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        groups = [{"params": [nn.Parameter(tensors[index]) for index in order], "algorithm": "muon"}]
        DualOptimizer(groups, process_group=dist.group.WORLD)
    return [str(warning.message) for warning in caught]


def test_copies_in_another_order_are_found() -> None:
    for (message,) in run_ranks(2, _swapped):
        assert message.startswith("parameter parameter_1: ranks 0 and 1 hold different copies")


def _added() -> list[str]:
    optimizer, _ = _built("ddp", _parameters("ddp"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        new = nn.Parameter(torch.full((4, 4), float(dist.get_rank())))
        optimizer.add_param_group({"params": [new], "param_names": ["new"], "algorithm": "muon"})
    return [str(warning.message) for warning in caught]


def test_a_group_that_is_added_is_compared() -> None:
    for (message,) in run_ranks(2, _added):
        assert message.startswith("parameter new: ranks 0 and 1 hold different copies")


def _nothing_shared() -> list[str]:
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for parameters in ([nn.Parameter(torch.randn(4, 4))], [sharded(torch.ones(4, 4) * dist.get_rank(), mesh)]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = DualOptimizer([{"params": parameters, "param_names": ["a"], "algorithm": "adamw"}])
        optimizer.check_replicas()
        found += [str(warning.message) for warning in caught]
    return found


def test_shards_and_tensors_of_one_rank_are_no_copies() -> None:
    assert run_ranks(2, _nothing_shared) == [[], []]


def test_one_process_has_no_copies() -> None:
    small_optimizer().check_replicas()
