"""What programs do beside the optimizer: write weights, cast, exchange parameters, step without gradients."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import set_gradient, sharded, whole, whole_tensors
from small_optimizer import assert_same, fill_gradients, parameters_of, small_optimizer, snapshot
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from omn_dist import PRESETS, DualOptimizer, QKClip, build_parameter_groups
from omn_dist.plan.geometry.placement import local_tensor

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:.*rounds away")]


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None


def _step(optimizer: DualOptimizer, seed: int) -> None:
    fill_gradients(optimizer, seed)
    optimizer.step()


# --- masters ----------------------------------------------------------------------------------------


def _write_data(parameter: nn.Parameter) -> None:
    parameter.data.mul_(0.5)


def _write_no_grad(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def _write_copy(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.copy_(parameter * 0.5)


def _write_local(parameter: nn.Parameter) -> None:
    local_tensor(parameter.detach()).mul_(0.5)


def _masters_follow() -> None:
    for write in (_write_data, _write_no_grad, _write_copy, _write_local):
        optimizer = small_optimizer(_mesh(), torch.bfloat16, master_weights=True)
        _step(optimizer, 1)
        for parameter in parameters_of(optimizer):
            write(parameter)
        before = snapshot(optimizer)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        _step(optimizer, 2)
        after = snapshot(optimizer)
        for name in "abcde":
            assert torch.equal(after[name], before[name]), (write, name)
            assert torch.equal(after[f"{name}.master"], before[name].float()), (write, name)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_master_follows_what_others_write(world_size: int) -> None:
    run_ranks(world_size, _masters_follow)


def test_a_master_keeps_its_bits_where_nobody_wrote() -> None:
    optimizer, other = (small_optimizer(None, torch.bfloat16, master_weights=True) for _ in range(2))
    for seed in range(3):
        _step(optimizer, seed)
        _step(other, seed)
        # Averaged weights for an evaluation, and back.
        kept = [parameter.detach().clone() for parameter in parameters_of(other)]
        with torch.no_grad():
            for parameter, weights in zip(parameters_of(other), kept, strict=True):
                parameter.zero_()
                parameter.copy_(weights)
    assert_same(snapshot(optimizer), snapshot(other))
    parameter = parameters_of(other)[0]
    before = other.state[parameter]["master"].clone()
    with torch.no_grad():
        parameter[1, 2] = 3.0
    other.state_dict()
    after = other.state[parameter]["master"]
    assert after[1, 2] == 3.0
    assert (after != before).sum() == 1


def test_weights_loaded_after_the_optimizer_was_built_stay() -> None:
    optimizer = small_optimizer(None, torch.bfloat16, master_weights=True, lr=0.0, adamw_lr=0.0)
    loaded = whole_tensors([tuple(parameter.shape) for parameter in parameters_of(optimizer)], 99)
    with torch.no_grad():
        for parameter, weights in zip(parameters_of(optimizer), loaded, strict=True):
            parameter.copy_(weights)
    _step(optimizer, 0)
    for parameter, weights in zip(parameters_of(optimizer), loaded, strict=True):
        assert torch.equal(parameter.detach(), weights.bfloat16())


def _largest_logits(query: Tensor, key: Tensor, inputs: Tensor) -> Tensor:
    heads = [(inputs @ w.float().T).view(16, 2, 4).transpose(0, 1) for w in (query, key)]
    return (heads[0] @ heads[1].transpose(1, 2) / 2).abs().amax((1, 2))


def _clipped_training(steps: int, master_weights: bool) -> list[float]:
    weights = [tensor.mul(3).bfloat16() for tensor in whole_tensors(((8, 8), (8, 8)), 0)]
    (inputs,) = whole_tensors(((16, 8),), 1)
    query, key = (sharded(tensor, _mesh()) for tensor in weights)
    groups = [{"params": [query, key], "algorithm": "muon", "param_names": ["q", "k"]}]
    optimizer = DualOptimizer(groups, preset="muonclip", master_weights=master_weights, lr=1e-3)
    clip = QKClip(threshold=10.0)
    clip.add_grouped("attention", query, key, num_heads=2)
    largest = []
    for step in range(steps):
        for parameter, gradient in zip((query, key), whole_tensors(((8, 8), (8, 8)), 10 + step), strict=True):
            set_gradient(parameter, gradient.bfloat16())
        clip.observe("attention", _largest_logits(whole(query), whole(key), inputs))
        optimizer.step()
        clip.step()
        largest.append(float(_largest_logits(whole(query), whole(key), inputs).max()))
    return largest


@pytest.mark.parametrize("world_size", [1, 2])
def test_qk_clip_holds_logits_in_a_run_with_masters(world_size: int) -> None:
    with_masters = run_ranks(world_size, _clipped_training, 6, True)[0]
    assert max(with_masters) < 12, with_masters
    without = run_ranks(world_size, _clipped_training, 6, False)[0]
    assert max(without) < 12, without


def test_masters_in_state_dicts(caplog: pytest.LogCaptureFixture) -> None:
    plain, master = (small_optimizer(None, torch.bfloat16, master_weights=masters) for masters in (False, True))
    _step(plain, 1)
    _step(master, 1)
    target = small_optimizer(None, torch.bfloat16, master_weights=True)
    with caplog.at_level(logging.WARNING, "omn_dist"):
        target.load_state_dict(plain.state_dict())
        assert "5 parameters such as a were saved without masters" in caplog.text
        caplog.clear()
        small_optimizer(None, torch.bfloat16).load_state_dict(master.state_dict())
        assert "5 parameters such as a were saved with masters, which are dropped" in caplog.text
    for parameter in parameters_of(target):
        assert torch.equal(target.state[parameter]["master"], parameter.detach().float())
        assert target.state[parameter].get("momentum_buffer", target.state[parameter]["master"]).dtype == torch.float32


@pytest.mark.parametrize("preset", ["torch", "normuon"])
def test_state_that_is_wider_than_a_master(preset: str) -> None:
    optimizer, wide = (small_optimizer(None, torch.bfloat16, master_weights=True, preset=preset, lr=0.05) for _ in range(2))
    _step(optimizer, 1)
    _step(wide, 1)
    saved = copy.deepcopy(wide.state_dict())
    for state in saved["state"].values():
        state.update({key: state[key].double() for key in ("momentum_buffer", "exp_avg", "exp_avg_sq") if key in state})
    wide.load_state_dict(saved)
    _step(optimizer, 2)
    _step(wide, 2)
    found, expected = snapshot(wide), snapshot(optimizer)
    for name in "abcde":
        assert torch.equal(found[name], found[f"{name}.master"].bfloat16())
        torch.testing.assert_close(found[f"{name}.master"], expected[f"{name}.master"], rtol=1e-5, atol=1e-6)


# --- casts ------------------------------------------------------------------------------------------

b, f = torch.bfloat16, torch.float32
CASTS = [
    (b, f, False, False),
    (f, b, False, False),
    (b, b, False, True),
    (b, b, True, False),
    (b, f, True, False),
    (f, b, False, True),
]


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize(("saved", "built", "had_masters", "has_masters"), CASTS)
def test_state_of_another_dtype_loads(
    preset: str, saved: torch.dtype, built: torch.dtype, had_masters: bool, has_masters: bool
) -> None:
    rates = {"lr": 0.05, "adamw_lr": 0.05}
    first = small_optimizer(None, saved, master_weights=had_masters, preset=preset, **rates)
    _step(first, 1)
    second = small_optimizer(None, built, master_weights=has_masters, preset=preset, **rates)
    second.load_state_dict(first.state_dict())
    for parameter, before in zip(parameters_of(second), parameters_of(first), strict=True):
        for key, value in second.state[parameter].items():
            if key in first.state[before]:
                assert torch.equal(value, first.state[before][key].to(value.dtype)), key
                assert value.dtype.itemsize >= first.state[before][key].dtype.itemsize
    before_step = snapshot(second)
    _step(second, 2)
    assert all(not torch.equal(before_step[name], snapshot(second)[name]) for name in "abcde")


def _cast_in_place(target: torch.dtype, source: torch.dtype) -> dict[str, dict[str, Tensor]]:
    results = {}
    for preset in sorted(PRESETS):
        for masters in (False, True):
            optimizer = small_optimizer(_mesh(), source, preset=preset, master_weights=masters)
            _step(optimizer, 1)
            nn.ParameterList(parameters_of(optimizer)).to(target)
            _step(optimizer, 2)
            _step(optimizer, 3)
            found = results[f"{preset}, masters {masters}"] = snapshot(optimizer)
            assert {found[name].dtype for name in "abcde"} == {target}
            assert all(tensor.isfinite().all() for tensor in found.values())
    return results


@pytest.mark.parametrize(("source", "target"), [(b, f), (f, b)])
def test_a_cast_after_construction_steps_alike_on_any_ranks(source: torch.dtype, target: torch.dtype) -> None:
    (expected,) = run_ranks(1, _cast_in_place, target, source)
    for found in run_ranks(3, _cast_in_place, target, source):
        for what in expected:
            assert_same(found[what], expected[what])


# --- exchanged parameters ---------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width), nn.LayerNorm(width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.relu(self.up(self.norm(inputs))))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(_Block(6), _Block(6))


def _shard(model: nn.Module) -> None:
    for block in model:
        fully_shard(block, mesh=_mesh())
    fully_shard(model, mesh=_mesh())


def _train(model: nn.Module, optimizer: DualOptimizer, seed: int) -> None:
    (inputs,) = whole_tensors(((4, 6),), seed)
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _exchange(model: nn.Module, optimizer: DualOptimizer) -> None:
    """As accelerate does it: the same places in the groups, other parameters."""
    name_by_pointer = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    names = [[name_by_pointer[parameter.data_ptr()] for parameter in group["params"]] for group in optimizer.param_groups]
    _shard(model)
    new = dict(model.named_parameters())
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [new[name] for name in of_group]


def _exchanges() -> None:
    for preset in ("omn", "normuon"):
        for steps_before, look in ((0, "step"), (2, "step"), (0, "state_dict"), (2, "state_dict"), (1, "add_param_group")):
            _exchanged(preset, steps_before, look)


def _exchanged(preset: str, steps_before: int, look: str) -> None:
    model, expected_model = _model(), _model()
    optimizer = DualOptimizer(build_parameter_groups(model), preset=preset)
    expected = DualOptimizer(build_parameter_groups(expected_model), preset=preset)
    for seed in range(steps_before):
        _train(model, optimizer, seed)
        _train(expected_model, expected, seed)
    _exchange(model, optimizer)
    if look == "state_dict":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if look == "add_param_group":
        extra, other = (nn.Parameter(tensor) for tensor in whole_tensors(((3,), (3,)), 5))
        optimizer.add_param_group({"params": [extra], "param_names": ["extra"], "algorithm": "adamw"})
        expected.add_param_group({"params": [other], "param_names": ["extra"], "algorithm": "adamw"})
    for seed in range(5, 8):
        _train(model, optimizer, seed)
        _train(expected_model, expected, seed)
    assert_same({**snapshot(optimizer), "extra": torch.zeros(3)}, {**snapshot(expected), "extra": torch.zeros(3)})
    parameters = dict(model.named_parameters())
    assert {id(parameter) for parameter in optimizer.state} >= {id(parameter) for parameter in parameters.values()}


def test_parameters_exchanged_for_their_shards_train_on() -> None:
    run_ranks(2, _exchanges)


def test_an_exchange_is_said_and_follows_names() -> None:
    optimizer, expected = small_optimizer(), small_optimizer()
    _step(optimizer, 1)
    _step(expected, 1)
    group = optimizer.param_groups[0]
    group["params"] = group["params"][::-1]
    optimizer.state_dict()
    assert group["param_names"] == ["c", "b", "a"]
    gradients = dict(zip("abcde", whole_tensors([(16, 8), (5, 6), (3, 8), (9,), (4, 4)], 2), strict=True))
    for tested in (optimizer, expected):
        for own in tested.param_groups:
            for name, parameter in zip(own["param_names"], own["params"], strict=True):
                parameter.grad = gradients[name].clone()
        tested.step()
    assert_same(snapshot(optimizer), snapshot(expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: [*params[:-1], nn.Parameter(torch.ones(4, 4))], r"parameter c: found one of shape \(4, 4\)"),
        (lambda params: params[:-1], "group 0: found 2 parameters, expected the 3"),
        (lambda params: [*params, nn.Parameter(torch.ones(4, 4))], "group 0: found 4 parameters.*add_param_group"),
    ],
)
def test_an_exchange_that_cannot_be_followed_is_refused(change: Callable[[list[Tensor]], list[Tensor]], message: str) -> None:
    optimizer = small_optimizer()
    optimizer.param_groups[0]["params"] = change(optimizer.param_groups[0]["params"])
    with pytest.raises(ValueError, match=message):
        optimizer.step()


# --- steps without gradients ------------------------------------------------------------------------


def _nothing_moves() -> None:
    for preset in PRESETS:
        optimizer = small_optimizer(_mesh(), preset=preset)
        before = snapshot(optimizer)
        optimizer.step()
        assert_same(before, snapshot(optimizer))
        _step(optimizer, 1)
        optimizer.zero_grad()
        before = snapshot(optimizer)
        optimizer.step()
        assert_same(before, snapshot(optimizer))


def test_a_step_without_any_gradient_changes_nothing() -> None:
    run_ranks(2, _nothing_moves)


def test_a_copy_after_an_exchange_has_the_state() -> None:
    optimizer = small_optimizer()
    _step(optimizer, 1)
    before = snapshot(optimizer)
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(parameter.detach().clone()) for parameter in group["params"]]
    assert_same(snapshot(copy.deepcopy(optimizer)), before)


def test_a_refused_exchange_changes_nothing() -> None:
    optimizer = small_optimizer()
    matrices, vectors = optimizer.param_groups
    kept = list(matrices["params"]), list(vectors["params"])
    matrices["params"], vectors["params"] = kept[0][::-1], kept[1][:1]
    with pytest.raises(ValueError, match="group 1: found 1 parameters"):
        optimizer.step()
    assert matrices["param_names"] == ["a", "b", "c"]
    matrices["params"], vectors["params"] = kept
    _step(optimizer, 1)
