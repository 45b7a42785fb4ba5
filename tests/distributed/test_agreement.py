"""Ranks that were given other parameters, or the same ones in another order, are told so on all ranks."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import sharded, whole_tensors
from small_optimizer import fill_gradients, small_optimizer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from omn_dist import DualOptimizer

pytestmark = pytest.mark.distributed

Groups = list[dict[str, Any]]


def _groups(mesh: DeviceMesh | None) -> Groups:
    matrices = [sharded(tensor, mesh) for tensor in whole_tensors(((8, 8),) * 3, 0)]
    vectors = [sharded(tensor, mesh) for tensor in whole_tensors(((6,),) * 3, 1)]
    return [
        {"params": matrices, "param_names": ["a", "b", "c"], "algorithm": "muon"},
        {"params": vectors, "param_names": ["d", "e", "f"], "algorithm": "adamw"},
    ]


def _reverse(group: int) -> Callable[[Groups], None]:
    def change(groups: Groups) -> None:
        for key in ("params", "param_names"):
            groups[group][key].reverse()

    return change


def _rename(groups: Groups) -> None:
    groups[1]["param_names"][1] = "g"


def _other_dtype(groups: Groups) -> None:
    groups[1]["params"][2] = nn.Parameter(groups[1]["params"][2].detach().to(torch.float64))


def _other_shape(groups: Groups) -> None:
    mesh = getattr(groups[1]["params"][0], "device_mesh", None)
    groups[1]["params"][0] = sharded(torch.zeros(5), mesh)


def _other_algorithm(groups: Groups) -> None:
    groups[0]["algorithm"] = "adamw"


def _one_less(groups: Groups) -> None:
    for key in ("params", "param_names"):
        groups[1][key].pop()


def _two_groups(groups: Groups) -> None:
    groups.append({key: groups[1][key][1:] if key != "algorithm" else "adamw" for key in groups[1]})
    for key in ("params", "param_names"):
        groups[1][key] = groups[1][key][:1]


CHANGES: dict[str, tuple[Callable[[Groups], None], str]] = {
    "matrices in another order": (_reverse(0), "rank 0 has a [8, 8] torch.float32"),
    "vectors in another order": (_reverse(1), "rank 0 has d [6] torch.float32"),
    "groups in another order": (list.reverse, "rank 1 has d [6] torch.float32"),
    "another name": (_rename, "rank 1 has g [6]"),
    "another dtype": (_other_dtype, "rank 1 has f [6] torch.float64"),
    "another shape": (_other_shape, "rank 1 has d [5]"),
    "another algorithm": (_other_algorithm, "on adamw"),
    "one parameter less": (_one_less, "rank 1 has nothing more"),
    "another grouping": (_two_groups, "in group 2"),
}


def _with(change: str, is_sharded: bool) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    groups = _groups(mesh if is_sharded else None)
    if dist.get_rank() == 1:
        CHANGES[change][0](groups)
    with pytest.raises(ValueError, match="parameters: ranks 0 and 1 of 2 differ") as caught:
        DualOptimizer(groups, process_group=None if is_sharded else dist.group.WORLD)
    return str(caught.value)


@pytest.mark.parametrize("is_sharded", [True, False], ids=["sharded", "copies"])
@pytest.mark.parametrize("change", CHANGES)
def test_ranks_with_other_parameters_all_raise(change: str, is_sharded: bool) -> None:
    messages = run_ranks(2, _with, change, is_sharded)
    assert messages[0] == messages[1]
    assert CHANGES[change][1] in messages[0]
    assert "build_parameter_groups(model)" in messages[0]
    assert "\n" not in messages[0]


def _later(event: str) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    optimizer = small_optimizer(mesh)
    fill_gradients(optimizer, 0)
    optimizer.step()
    if event == "add_param_group":
        names = ["x", "y"] if dist.get_rank() == 0 else ["y", "x"]
        new = [sharded(tensor, mesh) for tensor in whole_tensors(((3,), (3,)), 2)]
        with pytest.raises(ValueError, match="differ") as caught:
            optimizer.add_param_group({"params": new, "param_names": names, "algorithm": "adamw"})
        return str(caught.value)
    if event == "deepcopy":
        optimizer = copy.deepcopy(optimizer)
    else:
        optimizer.load_state_dict(optimizer.state_dict())
    if dist.get_rank() == 1:
        optimizer.param_groups[1]["param_names"] = ["e", "d"]
    with pytest.raises(ValueError, match="differ") as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("event", ["add_param_group", "deepcopy", "load_state_dict"])
def test_they_are_compared_whenever_plans_are_made(event: str) -> None:
    messages = run_ranks(2, _later, event)
    assert messages[0] == messages[1]


def _on_two_meshes() -> str:
    """Ranks 0 and 1 share one more parameter than all three do, on a mesh of their own."""
    world, pair = init_device_mesh("cpu", (3,)), DeviceMesh("cpu", [0, 1])
    (weight,) = whole_tensors(((6,),), 0)
    groups = [{"params": [sharded(weight, world)], "param_names": ["shared"], "algorithm": "adamw"}]
    if dist.get_rank() < 2:
        groups.insert(0, {"params": [sharded(weight, pair)], "param_names": ["of two"], "algorithm": "adamw"})
    optimizer = DualOptimizer(groups)
    fill_gradients(optimizer, 1)
    optimizer.step()
    optimizer.check_replicas()
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["param_names"] = ["renamed"]
    optimizer.load_state_dict(optimizer.state_dict())
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_may_have_other_parameters_elsewhere() -> None:
    first, second, third = run_ranks(3, _on_two_meshes)
    assert third == ""
    assert first == second
    assert "rank 0 has of two [6]" in first


def _unnamed(shapes: tuple[tuple[int, ...], ...], named: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters: list[Any] = [sharded(tensor, mesh) for tensor in whole_tensors(shapes, 0)]
    if named:
        parameters = [(f"layers.{index}", parameter) for index, parameter in enumerate(parameters)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DualOptimizer([{"params": parameters, "algorithm": "adamw"}])
    return [str(warning.message) for warning in caught]


def test_shards_without_names_and_of_equal_shapes_cause_one_warning() -> None:
    for (message,) in run_ranks(2, _unnamed, ((6,), (6,), (7,)), False):
        assert message.startswith("2 sharded parameters such as parameter_0 have no names")
        assert "named_parameters()" in message
    assert run_ranks(2, _unnamed, ((6,), (6,)), True) == [[], []]
    assert run_ranks(2, _unnamed, ((6,), (7,)), False) == [[], []]
    assert run_ranks(1, _unnamed, ((6,), (6,)), False) == [[]]


def _loaded_on_two_meshes() -> str:
    """A state dict that does not fit on rank 1, for a parameter that rank 2 does not have."""
    world, pair = init_device_mesh("cpu", (3,)), DeviceMesh("cpu", [0, 1])
    (weight,) = whole_tensors(((6,),), 0)
    groups = [{"params": [sharded(weight, world)], "param_names": ["shared"], "algorithm": "adamw"}]
    if dist.get_rank() < 2:
        groups.insert(0, {"params": [sharded(weight, pair)], "param_names": ["of two"], "algorithm": "adamw"})
    optimizer = DualOptimizer(groups)
    saved = copy.deepcopy(optimizer.state_dict())
    if dist.get_rank() == 1:
        saved["state"][0]["exp_avg"] = torch.zeros(2)
    with pytest.raises(ValueError, match="load_state_dict") as caught:
        optimizer.load_state_dict(saved)
    return str(caught.value)


def test_a_state_dict_is_refused_on_all_meshes() -> None:
    messages = run_ranks(3, _loaded_on_two_meshes)
    assert len(set(messages)) == 1
    assert "parameter of two: exp_avg: found a float32 tensor of shape (2,)" in messages[0]
