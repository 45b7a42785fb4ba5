"""State from outside: what fits is taken to the bit, what can be converted is, and the rest is refused on all ranks."""

import copy
import io
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import set_gradient, sharded, whole_tensors
from small_optimizer import assert_same, fill_gradients, parameters_of, small_optimizer, snapshot
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from omn_dist import DualOptimizer, build_parameter_groups
from omn_dist.optim.loading import joined

pytestmark = pytest.mark.distributed


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _with_all_kinds(mesh: DeviceMesh | None, preset: str = "normuon", **options: Any) -> DualOptimizer:
    """Matrices, a stack, a transposed matrix with AdamW rows, a vector rule and AdamW."""
    shapes = ((16, 8), (3, 6), (8, 5, 6), (10, 7), (9,), (4, 4), (7,))
    a, b, stack, rows, c, d, vector = (sharded(tensor, mesh) for tensor in whole_tensors(shapes, 0))
    return DualOptimizer(
        [
            {"params": [a, b], "algorithm": "muon", "param_names": ["a", "b"]},
            {"params": [stack], "algorithm": "muon", "param_names": ["stack"], "muon_shape": (8, 5, 6)},
            {
                "params": [rows],
                "algorithm": "muon",
                "param_names": ["rows"],
                "muon_split_sizes": (6, 4),
                "muon_split_algorithms": ("muon", "adamw"),
            },
            {"params": [vector], "algorithm": "vector", "param_names": ["vector"]},
            {"params": [c, d], "algorithm": "adamw", "param_names": ["c", "d"]},
        ],
        preset=preset,
        **options,
    )


def _steps(optimizer: DualOptimizer, *seeds: int) -> None:
    for seed in seeds:
        fill_gradients(optimizer, seed)
        optimizer.step()


def _saved(optimizer: DualOptimizer) -> Any:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def _copy_weights(target: DualOptimizer, source: dict[str, Tensor]) -> None:
    for group in target.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            set_gradient(parameter, source[name])
            with torch.no_grad():
                parameter.copy_(parameter.grad)


# --- refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state[0].update(momentum_buffer=state[0]["momentum_buffer"][:4].clone()),
            r"parameter a: momentum_buffer.*\(4, 8\)",
        ),
        (lambda state: state[3].update(exp_avg=state[3]["exp_avg"][:4].clone()), r"parameter d: exp_avg.*\(4,\).*\(9,\)"),
        (
            lambda state: state[1].update(momentum_buffer=state[1]["momentum_buffer"].T),
            r"parameter b: momentum_buffer.*\(6, 5\).*\(5, 6\)",
        ),
        (lambda state: state[1].update(momentum_buffer=state[1]["momentum_buffer"].to("meta")), "parameter b.*meta"),
        (lambda state: state[1].update(momentum_buffer=state[1]["momentum_buffer"].to_sparse()), "parameter b.*dense"),
        (lambda state: state[1].update(momentum_buffer=state[1]["momentum_buffer"].long()), "parameter b.*floating"),
        (lambda state: state[1].update(momentum_buffer="rm -rf"), "parameter b.*found str"),
        (lambda state: state[3].update(step=torch.ones(2)), "parameter d: step.*one number"),
        (
            lambda state: state[3].pop("exp_avg_sq"),
            "parameter d: found the state exp_avg, step, expected exp_avg, exp_avg_sq, step",
        ),
        (lambda state: state.update({0: state[3]}), "parameter a: found the state exp_avg.*expected momentum_buffer"),
        (lambda state: state[3].update(max_exp_avg_sq=state[3]["exp_avg"]), "parameter d: found the state.*max_exp_avg_sq"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_changes(change: Callable[[dict[int, Any]], Any], message: str) -> None:
    optimizer = small_optimizer()
    _steps(optimizer, 1)
    saved, before = copy.deepcopy(optimizer.state_dict()), snapshot(optimizer)
    change(saved["state"])
    saved["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_same(before, snapshot(optimizer))
    assert optimizer.param_groups[0]["lr"] != 7.0


@pytest.mark.parametrize("saved", [{}, {"state": {}}, [], {"state": {}, "param_groups": [{"params": [0]}]}])
def test_what_is_no_state_dict_is_refused(saved: Any) -> None:
    with pytest.raises(ValueError, match=r"load_state_dict: .*expected"):
        small_optimizer().load_state_dict(saved)


def test_values_of_saved_groups_are_checked() -> None:
    optimizer = small_optimizer()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"lr: found -1\.0"):
        optimizer.load_state_dict(saved)


def _save_of_each_rank() -> bytes:
    optimizer = _with_all_kinds(_mesh())
    _steps(optimizer, 1, 2)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    return buffer.getvalue()


def _load_of_each_rank(files: list[bytes], is_sharded: bool) -> str:
    optimizer = _with_all_kinds(_mesh() if is_sharded else None)
    before = snapshot(optimizer)
    try:
        optimizer.load_state_dict(torch.load(io.BytesIO(files[dist.get_rank()]), weights_only=False))
    except ValueError as error:
        assert_same(before, snapshot(optimizer))
        return str(error)
    return ""


@pytest.mark.parametrize(("world_size", "is_sharded"), [(2, True), (1, True), (1, False), (4, True)])
def test_what_single_ranks_saved_loads_on_the_same_ranks_only(world_size: int, is_sharded: bool) -> None:
    files = run_ranks(4, _save_of_each_rank)
    errors = run_ranks(world_size, _load_of_each_rank, files, is_sharded)
    if world_size == 4:
        assert errors == [""] * 4
        return
    assert len(set(errors)) == 1
    assert "parameter a: momentum_buffer: found a float32 tensor of shape (16, 8)" in errors[0]
    assert "on a mesh of shape (4,)" in errors[0]
    assert "torch.distributed.checkpoint" in errors[0]


def _fit_everywhere_but_on_rank_1() -> str:
    optimizer = _with_all_kinds(_mesh())
    _steps(optimizer, 1)
    saved, before = copy.deepcopy(optimizer.state_dict()), snapshot(optimizer)
    if dist.get_rank() == 1:
        saved["state"][1]["momentum_buffer"] = torch.zeros(2, 6)
    with pytest.raises(ValueError, match="load_state_dict") as caught:
        optimizer.load_state_dict(saved)
    assert_same(before, snapshot(optimizer))
    _steps(optimizer, 2)
    return str(caught.value)


def test_all_ranks_raise_what_one_found() -> None:
    errors = run_ranks(3, _fit_everywhere_but_on_rank_1)
    assert len(set(errors)) == 1
    assert "parameter b: momentum_buffer: found a float32 tensor of shape (2, 6)" in errors[0]


# --- converted --------------------------------------------------------------------------------------


def _from_one_process(saved: Any, weights: dict[str, Tensor], expected: dict[str, Tensor], mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    optimizer = _with_all_kinds(mesh) if len(mesh_shape) == 1 else _on_two_axes(mesh)
    _copy_weights(optimizer, weights)
    optimizer.load_state_dict(saved)
    _steps(optimizer, 3, 4)
    assert_same(snapshot(optimizer), expected)


def _on_two_axes(mesh: DeviceMesh) -> DualOptimizer:
    optimizer = _with_all_kinds(None)
    for group in optimizer.param_groups:
        placements = (
            (Shard(0), Shard(1)) if group["params"][0].ndim > 1 and "muon_split_sizes" not in group else (Replicate(), Shard(0))
        )
        group["params"] = [sharded(parameter.detach(), mesh, placements) for parameter in group["params"]]
    return optimizer


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (2, 2)])
def test_state_of_one_process_goes_to_the_shards(mesh_shape: tuple[int, ...]) -> None:
    optimizer = _with_all_kinds(None)
    _steps(optimizer, 1, 2)
    saved, weights = copy.deepcopy(optimizer.state_dict()), snapshot(optimizer)
    _steps(optimizer, 3, 4)
    run_ranks(torch.Size(mesh_shape).numel(), _from_one_process, saved, weights, snapshot(optimizer), mesh_shape)


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(inputs)))


def _network(seed: int) -> tuple[nn.Module, DualOptimizer]:
    torch.manual_seed(seed)
    model = _Network()
    fully_shard(model, mesh=_mesh())
    return model, DualOptimizer(build_parameter_groups(model), preset="normuon")


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    (inputs,) = whole_tensors(((4, 6),), seed)
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _full_state_dict_without_the_option() -> None:
    model, optimizer = _network(0)
    _train(model, optimizer, 1)
    full = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))
    weights = copy.deepcopy(model.state_dict())
    other, loaded = _network(3)
    other.load_state_dict(weights)
    if dist.get_rank() > 0:
        # Only the first rank gets a full state dict from torch; here all ranks read one file.
        full = None
    box = [full]
    dist.broadcast_object_list(box)
    set_optimizer_state_dict(other, loaded, box[0])
    _train(model, optimizer, 2)
    _train(other, loaded, 2)
    assert_same(snapshot(optimizer), snapshot(loaded))


def test_a_full_state_dict_given_as_a_sharded_one() -> None:
    run_ranks(2, _full_state_dict_without_the_option)


def _another_placement() -> None:
    mesh = _mesh()
    first, second = _with_all_kinds(mesh), _with_all_kinds(mesh)
    _steps(first, 1)
    saved = copy.deepcopy(first.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 1:
                state[key] = value.redistribute(placements=[Shard(1)])  # type: ignore[attr-defined]
    _copy_weights(second, snapshot(first))
    second.load_state_dict(saved)
    _steps(first, 2)
    _steps(second, 2)
    assert_same(snapshot(first), snapshot(second))


def test_another_placement_on_the_same_mesh() -> None:
    run_ranks(3, _another_placement)


def test_counters_may_be_numbers_and_fields_may_be_missing() -> None:
    first, second = small_optimizer(preset="torch", lr=0.5), small_optimizer(preset="torch", lr=0.5, momentum=0.7)
    _steps(first, 1)
    saved = copy.deepcopy(first.state_dict())
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = int(state["step"])
    for group in saved["param_groups"]:
        for field in ("param_names", "param_shapes", "momentum", "eps", "ns_steps", "cautious_decay"):
            group.pop(field, None)
        group["lr"] = 0.25
    _copy_weights(second, snapshot(first))
    second.load_state_dict(saved)
    assert_same(snapshot(first), snapshot(second))
    assert [group["lr"] for group in second.param_groups] == [0.25, 0.25]
    assert second.param_groups[0]["momentum"] == 0.7
    assert second.param_groups[0]["param_names"] == ["a", "b", "c"]
    _steps(second, 2)


def test_loaded_state_is_a_copy() -> None:
    first, second = small_optimizer(), small_optimizer()
    _steps(first, 1)
    second.load_state_dict(first.state_dict())
    kept = {tensor.data_ptr() for state in first.state.values() for tensor in state.values()}
    assert not kept & {tensor.data_ptr() for state in second.state.values() for tensor in state.values()}


# --- other optimizers -------------------------------------------------------------------------------


def _of_torch(optimizer: DualOptimizer) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices, vectors = ([nn.Parameter(p.detach().clone()) for p in group["params"]] for group in optimizer.param_groups)
    return torch.optim.Muon(matrices), torch.optim.AdamW(vectors, weight_decay=1e-2)


def _steps_of_torch(optimizers: tuple[torch.optim.Optimizer, ...], *seeds: int) -> dict[str, Tensor]:
    parameters = [parameter for optimizer in optimizers for parameter in optimizer.param_groups[0]["params"]]
    for seed in seeds:
        gradients = whole_tensors([tuple(parameter.shape) for parameter in parameters], seed)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in zip("abcde", parameters, strict=True)}


def _moved_from_torch(saved: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    optimizer = small_optimizer(_mesh(), preset="torch")
    _copy_weights(optimizer, weights)
    optimizer.load_state_dict(saved)
    _steps(optimizer, 3)
    return {name: tensor for name, tensor in snapshot(optimizer).items() if "." not in name}


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_of_torchs_muon_and_adamw_moves_here(world_size: int) -> None:
    optimizers = _of_torch(small_optimizer(preset="torch"))
    weights = _steps_of_torch(optimizers, 1, 2)
    saved = copy.deepcopy(joined([optimizer.state_dict() for optimizer in optimizers]))
    expected = _steps_of_torch(optimizers, 3)
    for found in run_ranks(world_size, _moved_from_torch, saved, weights):
        assert_same(found, expected)


def test_a_momentum_of_another_meaning_is_refused() -> None:
    optimizers = _of_torch(small_optimizer(preset="torch"))
    _steps_of_torch(optimizers, 1)
    saved = joined([optimizer.state_dict() for optimizer in optimizers])
    with pytest.raises(ValueError, match=r"momentum of torch.optim.Muon, which is a mean"):
        small_optimizer(preset="omn").load_state_dict(saved)


def test_state_of_adamw_where_muon_is_due_is_refused_by_name() -> None:
    optimizer = small_optimizer()
    adamw = torch.optim.AdamW([{"params": list(zip(g["param_names"], g["params"], strict=True))} for g in optimizer.param_groups])
    fill_gradients(optimizer, 0)
    adamw.step()
    with pytest.raises(ValueError, match="parameter a: found the state exp_avg, exp_avg_sq, step, expected momentum_buffer"):
        optimizer.load_state_dict(adamw.state_dict())


# --- missing ----------------------------------------------------------------------------------------


def _cleared(optimizer: DualOptimizer) -> None:
    optimizer.state.clear()


def _replaced(optimizer: DualOptimizer) -> None:
    optimizer.state = defaultdict(dict)


def _plain_dict(optimizer: DualOptimizer) -> None:
    optimizer.state = {}  # type: ignore[assignment]


def _popped(optimizer: DualOptimizer) -> None:
    for parameter in parameters_of(optimizer):
        del optimizer.state[parameter]


def _emptied(optimizer: DualOptimizer) -> None:
    for parameter in parameters_of(optimizer):
        optimizer.state[parameter].clear()


def _loaded_empty(optimizer: DualOptimizer) -> None:
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


REMOVALS = (_cleared, _replaced, _plain_dict, _popped, _emptied, _loaded_empty)


def _after_removals(is_sharded: bool) -> None:
    for remove in REMOVALS:
        mesh = _mesh() if is_sharded else None
        optimizer, fresh = small_optimizer(mesh), small_optimizer(mesh)
        _steps(optimizer, 1)
        _copy_weights(fresh, snapshot(optimizer))
        remove(optimizer)
        _steps(optimizer, 2)
        _steps(fresh, 2)
        assert_same(snapshot(optimizer), snapshot(fresh))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_missing_state_is_made(is_sharded: bool) -> None:
    run_ranks(2, _after_removals, is_sharded)


def test_a_state_dict_after_the_state_was_cleared_has_zeros() -> None:
    optimizer = small_optimizer()
    _steps(optimizer, 1)
    optimizer.state.clear()
    state = optimizer.state_dict()["state"]
    assert len(state) == 5
    assert not state[0]["momentum_buffer"].any()


def test_missing_state_is_said(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = small_optimizer()
    with caplog.at_level(logging.WARNING, "omn_dist"):
        optimizer.step()
        assert "no state" not in caplog.text
        del optimizer.state[parameters_of(optimizer)[1]]
        optimizer.step()
    assert "1 parameters such as b had no state: it starts anew" in caplog.text


@pytest.mark.parametrize(("position", "name"), [(1, "b"), (3, "d")])
def test_a_tensor_that_a_program_puts_into_the_state_is_checked(position: int, name: str) -> None:
    optimizer = small_optimizer()
    fill_gradients(optimizer, 0)
    optimizer.step()
    state = optimizer.state[parameters_of(optimizer)[position]]
    key = next(key for key, value in state.items() if value.ndim)
    state[key] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=rf"parameter {name}: found {key} of local shape \(2, 2\)"):
        optimizer.step()
