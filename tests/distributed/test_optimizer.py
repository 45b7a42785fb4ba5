"""DualOptimizer as a plain torch optimizer, on one process and on gloo ranks."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import set_gradient, sharded, whole, whole_tensors
from small_optimizer import SHAPES, assert_same, fill_gradients, parameters_of, small_optimizer, snapshot
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from omn_dist import DualOptimizer, build_parameter_groups
from omn_dist.optim.presets import PRESETS

# --- a plain optimizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lambda", "cosine", "sequential", "one_cycle"])
def test_schedulers_keep_the_ratio_of_the_learning_rates(kind: str) -> None:
    optimizer = small_optimizer()
    schedulers = torch.optim.lr_scheduler
    scheduler: Any
    if kind == "lambda":
        scheduler = schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    elif kind == "cosine":
        scheduler = schedulers.CosineAnnealingLR(optimizer, 20)
    elif kind == "one_cycle":
        scheduler = schedulers.OneCycleLR(optimizer, max_lr=[0.01, 0.0003], total_steps=20, cycle_momentum=False)
    else:
        scheduler = schedulers.SequentialLR(
            optimizer,
            [schedulers.LinearLR(optimizer, 0.1, total_iters=4), schedulers.CosineAnnealingLR(optimizer, 10)],
            milestones=[4],
        )
    seen = set()
    for step in range(10):
        fill_gradients(optimizer, step)
        optimizer.step()
        scheduler.step()
        muon, adamw = (group["lr"] for group in optimizer.param_groups)
        assert muon / adamw == pytest.approx(0.01 / 0.0003, rel=1e-9)
        seen.add(muon)
    assert len(seen) > 5


def test_rates_and_decay_are_read_at_step_time() -> None:
    optimizer = small_optimizer(weight_decay=0.0)
    before = snapshot(optimizer)
    fill_gradients(optimizer, 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 10.0
    optimizer.step()
    after = snapshot(optimizer)
    for name in ("a", "b", "c", "d", "e"):
        assert torch.equal(before[name], after[name]), "lr 0 must leave weights bit-identical"
    assert not torch.equal(before["a.momentum_buffer"], after["a.momentum_buffer"])


@pytest.mark.parametrize("preset", ["omn", "torch"])
def test_decay_is_decoupled_and_takes_the_groups_own_rate(preset: str) -> None:
    optimizer = small_optimizer(preset=preset)
    before = snapshot(optimizer)
    fill_gradients(optimizer, 0, scale=0.0)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.01, 10.0
    optimizer.step()
    after = snapshot(optimizer)
    for name in ("a", "b", "c", "d", "e"):
        assert float(after[name].norm() / before[name].norm()) == pytest.approx(0.9, rel=1e-6)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("sqrt(max(1, m/n))", 2.0),
        ("0.2*sqrt(max(m, n))", 0.2 * 32**0.5),
        ("sqrt(m/n)", 2.0),
        ("sqrt(max(m, n))", 32**0.5),
        ("1", 1.0),
    ],
)
def test_update_norm_in_closed_form(scale: str, expected: float) -> None:
    from omn_dist import orthogonalize

    weight, gradient = whole_tensors(((32, 8), (32, 8)), 3)
    parameter = nn.Parameter(weight.clone())
    optimizer = DualOptimizer([{"params": [parameter], "algorithm": "muon"}], scale=scale, lr=0.5, preset="omn")
    parameter.grad = gradient
    optimizer.step()
    update = orthogonalize(1.95 * gradient)
    ratio = float((parameter.detach() - weight).norm() / (0.5 * update.norm()))
    assert ratio == pytest.approx(expected, rel=1e-5)


def test_closure_and_zero_grad() -> None:
    optimizer = small_optimizer()
    first = parameters_of(optimizer)[0]

    def closure() -> float:
        optimizer.zero_grad()
        loss = first.square().sum()
        loss.backward()
        return loss.item()

    before = whole(first)
    assert optimizer.step(closure) == pytest.approx(float(before.square().sum()))
    assert not torch.equal(before, whole(first))
    optimizer.zero_grad()
    assert first.grad is None


def test_deepcopy_steps_alike_and_apart() -> None:
    optimizer = small_optimizer()
    fill_gradients(optimizer, 0)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    for one in (optimizer, twin):
        fill_gradients(one, 1)
        one.step()
    assert_same(snapshot(optimizer), snapshot(twin))
    fill_gradients(twin, 2)
    twin.step()
    assert not torch.equal(snapshot(optimizer)["a"], snapshot(twin)["a"])


def test_add_param_group_takes_part_in_the_next_step() -> None:
    optimizer = small_optimizer()
    late = nn.Parameter(whole_tensors(((6, 4),), 5)[0])
    optimizer.add_param_group({"params": [late], "param_names": ["late"], "algorithm": "muon", "lr": 0.2})
    assert [matrix.name for matrix in optimizer.plans[0].matrices] == ["a", "b", "c", "late"]
    before = whole(late)
    fill_gradients(optimizer, 0)
    optimizer.step()
    assert not torch.equal(before, whole(late))
    assert optimizer.param_groups[2]["momentum"] == 0.95


def test_state_dict_round_trip_is_bitwise() -> None:
    optimizer, other = small_optimizer(), small_optimizer()
    for step in range(3):
        fill_gradients(optimizer, step)
        optimizer.step()
    with torch.no_grad():
        for target, source in zip(parameters_of(other), parameters_of(optimizer), strict=True):
            target.copy_(source)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 5):
        for one in (optimizer, other):
            fill_gradients(one, step)
            one.step()
    assert_same(snapshot(optimizer), snapshot(other))


@pytest.mark.filterwarnings("ignore:.*rounds away")
def test_loading_keeps_the_saved_dtype() -> None:
    optimizer = small_optimizer(dtype=torch.bfloat16)
    saved = optimizer.state_dict()
    saved["state"][0]["momentum_buffer"] = torch.full(SHAPES[0], 1 + 2**-20)
    optimizer.load_state_dict(saved)
    momentum = optimizer.state[parameters_of(optimizer)[0]]["momentum_buffer"]
    assert momentum.dtype == torch.float32
    assert bool((momentum == 1 + 2**-20).all())


def test_loading_another_grouping_names_the_parameter() -> None:
    optimizer = small_optimizer()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["param_names"] = ["a", "b", "old"]
    with pytest.raises(ValueError, match=r"group 0.*only saved: \['old'\], only here: \['c'\]"):
        optimizer.load_state_dict(saved)
    saved["param_groups"][0]["algorithm"] = "adamw"
    with pytest.raises(ValueError, match="algorithm saved as 'adamw', found 'muon'"):
        optimizer.load_state_dict(saved)


@pytest.mark.filterwarnings("ignore:.*rounds away")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", ["sum", "ema"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_follows_its_formula_and_gradients_stay(dtype: torch.dtype, rule: str, nesterov: bool) -> None:
    optimizer = small_optimizer(dtype=dtype, momentum_rule=rule, nesterov=nesterov, preset="torch")
    expected = {id(parameter): torch.zeros(parameter.shape, dtype=torch.float64) for parameter in parameters_of(optimizer)[:3]}
    for step in range(3):
        fill_gradients(optimizer, step)
        gradients = [whole(parameter.grad) for parameter in parameters_of(optimizer)]
        optimizer.step()
        for parameter, gradient in zip(parameters_of(optimizer), gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)
            if id(parameter) in expected:
                buffer = expected[id(parameter)]
                expected[id(parameter)] = 0.95 * buffer + (1 if rule == "sum" else 0.05) * gradient.double()
    # bf16 keeps eight bits: three roundings of a sum of ones are within 3 * 2^-8.
    tolerance = 1e-6 if dtype == torch.float32 else 3 * 2**-8
    for parameter in parameters_of(optimizer)[:3]:
        found = optimizer.state[parameter]["momentum_buffer"].double()
        assert float((found - expected[id(parameter)]).norm() / found.norm()) < tolerance


def test_zero_gradients_stay_finite_and_unmoved() -> None:
    optimizer = small_optimizer()
    before = snapshot(optimizer)
    fill_gradients(optimizer, 0, scale=0.0)
    optimizer.step()
    after = snapshot(optimizer)
    assert_same({name: before[name] for name in "abcde"}, {name: after[name] for name in "abcde"})


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_matrices_without_elements_are_taken(preset: str, batch_invariant: bool) -> None:
    def stepped(*shapes: tuple[int, int]) -> Tensor:
        parameters = [nn.Parameter(torch.ones(shape)) for shape in ((4, 5), *shapes)]
        optimizer = DualOptimizer([{"params": parameters, "algorithm": "muon"}], preset=preset, batch_invariant=batch_invariant)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        return parameters[0].detach()

    assert torch.equal(stepped((0, 5), (0, 0)), stepped())


@pytest.mark.parametrize("fields", [{}, {"muon_split_sizes": (2, 1), "muon_split_algorithms": ("muon", "adamw")}])
def test_gradients_of_stacks_may_lie_anywhere_in_memory(fields: dict[str, Any]) -> None:
    (gradient,) = whole_tensors(((2, 3, 4),), 0)

    def stepped(gradient: Tensor) -> Tensor:
        parameter = nn.Parameter(torch.ones(2, 3, 4))
        optimizer = DualOptimizer([{"params": [parameter], "algorithm": "muon", "muon_shape": (2, 3, 4), **fields}], preset="omn")
        parameter.grad = gradient
        optimizer.step()
        return parameter.detach()

    assert torch.equal(stepped(gradient.mT.contiguous().mT), stepped(gradient))


@pytest.mark.filterwarnings("ignore:.*rounds away")
def test_half_precision_weights_lose_small_steps_unless_there_is_a_master() -> None:
    with pytest.warns(UserWarning, match="3 parameters on muon such as a are torch.bfloat16"):
        rounded = small_optimizer(dtype=torch.bfloat16, lr=1e-6, weight_decay=1e-3)
    kept = small_optimizer(dtype=torch.bfloat16, lr=1e-6, weight_decay=1e-3, master_weights=True)
    exact = small_optimizer(lr=1e-6, weight_decay=1e-3)
    with torch.no_grad():
        for parameter, source in zip(parameters_of(exact), parameters_of(kept), strict=True):
            parameter.copy_(source)
    before = whole(parameters_of(kept)[0])
    for step in range(4):
        for optimizer in (rounded, kept):
            fill_gradients(optimizer, step)
            optimizer.step()
        for parameter, source in zip(parameters_of(exact), parameters_of(kept), strict=True):
            parameter.grad = source.grad.float()
        exact.step()
    assert torch.equal(whole(parameters_of(rounded)[0]), before), "steps of 1e-6 vanish in bf16"
    for parameter, source in zip(parameters_of(exact), parameters_of(kept), strict=True):
        state, expected = kept.state[source], exact.state[parameter]
        assert torch.equal(state["master"], parameter.detach())
        assert torch.equal(source.detach(), parameter.detach().bfloat16())
        for key in expected:
            assert torch.equal(state[key], expected[key]), key


def test_several_dtypes_in_one_group() -> None:
    tensors = [
        tensor.to(dtype)
        for tensor, dtype in zip(whole_tensors(SHAPES, 0), (torch.float32, torch.bfloat16, torch.float64), strict=True)
    ]
    parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
    with pytest.warns(UserWarning, match="rounds away"):
        together = DualOptimizer([{"params": parameters, "algorithm": "muon"}], preset="omn")
    apart = [nn.Parameter(tensor.clone()) for tensor in tensors]
    for parameter, twin, gradient in zip(parameters, apart, whole_tensors(SHAPES, 1), strict=True):
        parameter.grad, twin.grad = gradient.to(parameter.dtype), gradient.to(parameter.dtype)
    together.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for twin in apart:
            DualOptimizer([{"params": [twin], "algorithm": "muon"}], preset="omn").step()
    for parameter, twin in zip(parameters, apart, strict=True):
        assert torch.equal(parameter, twin)


# --- ranks ---------------------------------------------------------------------------------------------------------------


def _built_before_fully_shard() -> str:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = DualOptimizer(build_parameter_groups(model), preset="omn")
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_built_before_fully_shard_is_an_error() -> None:
    assert all("before fully_shard" in message for message in run_ranks(2, _built_before_fully_shard))


def _missing(absent_on: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    optimizer = small_optimizer(mesh, wave_bytes=1)
    fill_gradients(optimizer, 0)
    optimizer.step()
    before = snapshot(optimizer)
    fill_gradients(optimizer, 1)
    parameter = parameters_of(optimizer)[0]
    if dist.get_rank() in absent_on:
        parameter.grad = None
    optimizer.step()
    after = snapshot(optimizer)
    # What the absent shards should count as.
    twin = small_optimizer(mesh)
    fill_gradients(twin, 0)
    twin.step()
    fill_gradients(twin, 1)
    parameter = parameters_of(twin)[0]
    if dist.get_rank() in absent_on:
        parameter.grad.to_local().zero_()
    twin.step()
    expected = snapshot(twin)
    return before, after, all(torch.equal(after[name], expected[name]) for name in after)


def test_a_gradient_absent_everywhere_leaves_every_bit() -> None:
    for before, after, _ in run_ranks(3, _missing, (0, 1, 2)):
        assert torch.equal(before["a"], after["a"])
        assert torch.equal(before["a.momentum_buffer"], after["a.momentum_buffer"])
        assert not torch.equal(before["b"], after["b"])


@pytest.mark.parametrize("absent_on", [(0,), (2,), (0, 1)])
def test_a_gradient_absent_on_some_ranks_counts_as_zeros(absent_on: tuple[int, ...]) -> None:
    for before, after, as_zeros in run_ranks(3, _missing, absent_on):
        assert as_zeros
        assert not torch.equal(before["a"], after["a"])


def _all_absent_on_one_rank() -> bool:
    mesh = init_device_mesh("cpu", (2,))
    optimizer = small_optimizer(mesh)
    before = snapshot(optimizer)
    fill_gradients(optimizer, 0)
    if dist.get_rank() == 1:
        optimizer.zero_grad()
    optimizer.step()
    return not torch.equal(before["a"], snapshot(optimizer)["a"])


def test_a_rank_without_any_gradient_neither_hangs_nor_raises() -> None:
    assert run_ranks(2, _all_absent_on_one_rank) == [True, True]


def _only_an_empty_shard() -> None:
    mesh = init_device_mesh("cpu", (2,))
    parameter = sharded(torch.ones(1, 6), mesh)
    optimizer = DualOptimizer([{"params": [parameter], "algorithm": "muon"}], preset="omn")
    if dist.get_rank() == 0:
        set_gradient(parameter, torch.ones(1, 6))
    optimizer.step()
    assert bool((whole(parameter) < 1).all())


def test_a_rank_with_nothing_but_an_empty_shard_needs_no_gradient() -> None:
    run_ranks(2, _only_an_empty_shard)


def _placements() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    optimizer = small_optimizer(mesh)
    placements = [parameter.placements for parameter in parameters_of(optimizer)]
    fill_gradients(optimizer, 0)
    optimizer.step()
    for parameter, placement in zip(parameters_of(optimizer), placements, strict=True):
        assert parameter.placements == placement
        for key, value in optimizer.state[parameter].items():
            if key != "step":
                assert isinstance(value, DTensor)
                assert value.placements == placement
                assert value.shape == parameter.shape


def test_state_has_the_placements_of_its_parameter() -> None:
    run_ranks(4, _placements)


def _partial_gradient() -> str:
    from torch.distributed.tensor import Partial

    mesh = init_device_mesh("cpu", (2,))
    optimizer = small_optimizer(mesh)
    fill_gradients(optimizer, 0)
    parameter = parameters_of(optimizer)[0]
    parameter.grad = DTensor.from_local(torch.ones(16, 8), mesh, [Partial()])
    with pytest.raises(ValueError, match="expected") as caught:
        optimizer.step()
    return str(caught.value)


def test_partial_gradients_are_refused() -> None:
    assert all("Partial" in message for message in run_ranks(2, _partial_gradient))


def _state_dict_helpers() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    fully_shard(model, mesh=mesh)
    optimizer = DualOptimizer(build_parameter_groups(model, weight_decay=0.1), preset="omn")
    before = snapshot(optimizer)
    get_optimizer_state_dict(model, optimizer)
    assert_same(before, snapshot(optimizer))
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer)
    fresh = DualOptimizer(build_parameter_groups(model, weight_decay=0.1), preset="omn")
    set_optimizer_state_dict(model, fresh, saved)
    assert_same(snapshot(optimizer), snapshot(fresh))


def test_state_dict_helpers_run_no_hidden_step() -> None:
    run_ranks(2, _state_dict_helpers)


def _deepcopy_on_ranks() -> None:
    optimizer = small_optimizer(init_device_mesh("cpu", (2,)))
    fill_gradients(optimizer, 0)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    for one in (optimizer, twin):
        fill_gradients(one, 1)
        one.step()
    assert_same(snapshot(optimizer), snapshot(twin))


def test_deepcopy_on_ranks() -> None:
    run_ranks(2, _deepcopy_on_ranks)
