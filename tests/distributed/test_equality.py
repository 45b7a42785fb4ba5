"""The contract: bitwise the weights of one process, for every world size, wave budget, owner and transport."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import SHAPES, OMNReference, set_gradient, sharded, whole, whole_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from omn_dist import DualOptimizer

NUM_STEPS = 5
VECTOR_SHAPES = ((7,), (33, 5), (1,), (64,))
# Each shape twice, so that there is more than one wave on four ranks.
MATRIX_SHAPES = SHAPES * 2
NAMES = [f"matrix_{index:02}" for index in range(len(MATRIX_SHAPES))]


def _build(mesh: DeviceMesh | None, **options: Any) -> tuple[list[nn.Parameter], list[nn.Parameter], DualOptimizer]:
    matrices = [sharded(tensor, mesh) for tensor in whole_tensors(MATRIX_SHAPES, 0)]
    vectors = [sharded(tensor, mesh) for tensor in whole_tensors(VECTOR_SHAPES, 1)]
    groups = [
        {"params": matrices, "param_names": NAMES, "algorithm": "muon", "weight_decay": 0.1},
        {"params": vectors, "algorithm": "adamw", "weight_decay": 0.02},
    ]
    return matrices, vectors, DualOptimizer(groups, **{"preset": "omn", **options})


def _gradients(step: int) -> tuple[list[Tensor], list[Tensor]]:
    return whole_tensors(MATRIX_SHAPES, 100 + step), whole_tensors(VECTOR_SHAPES, 200 + step)


def _reference(preset: str) -> list[Tensor]:
    """Weights, momentum and AdamW moments after the last step, from whole tensors in this process."""
    matrices, vectors = whole_tensors(MATRIX_SHAPES, 0), whole_tensors(VECTOR_SHAPES, 1)
    weights = [nn.Parameter(tensor) for tensor in matrices]
    others = [nn.Parameter(tensor) for tensor in vectors]
    betas, adamw_lr = ((0.9, 0.95), 3e-4) if preset == "omn" else ((0.9, 0.999), 1e-3)
    adamw = torch.optim.AdamW(others, lr=adamw_lr, betas=betas, weight_decay=0.02)
    muon = torch.optim.Muon(weights, weight_decay=0.1)
    omn = OMNReference(dict(zip(NAMES, matrices, strict=True)), weight_decay=0.1)
    for step in range(NUM_STEPS):
        gradients, other_gradients = _gradients(step)
        omn.step(dict(zip(NAMES, gradients, strict=True)))
        for parameter, gradient in zip([*weights, *others], [*gradients, *other_gradients], strict=True):
            parameter.grad = gradient
        muon.step()
        adamw.step()
    moments = [adamw.state[other][key] for other in others for key in ("exp_avg", "exp_avg_sq")]
    if preset == "omn":
        return [*omn.weights.values(), *omn.momentum.values(), *others, *moments]
    return [*weights, *(muon.state[weight]["momentum_buffer"] for weight in weights), *others, *moments]


def _sharded_result(mesh: DeviceMesh | None, **options: Any) -> tuple[list[Tensor], DualOptimizer]:
    matrices, vectors, optimizer = _build(mesh, **options)
    for step in range(NUM_STEPS):
        gradients, other_gradients = _gradients(step)
        parameters = [*matrices, *vectors]
        for parameter, gradient in zip(parameters, [*gradients, *other_gradients], strict=True):
            set_gradient(parameter, gradient)
        optimizer.step()
        for parameter, gradient in zip(parameters, [*gradients, *other_gradients], strict=True):
            assert torch.equal(whole(parameter.grad), gradient), "a step changed a gradient"  # type: ignore[arg-type]
    state = optimizer.state
    result = [
        *matrices,
        *(state[matrix]["momentum_buffer"] for matrix in matrices),
        *vectors,
        *(state[vector][key] for vector in vectors for key in ("exp_avg", "exp_avg_sq")),
    ]
    return [whole(tensor) for tensor in result], optimizer


def _assert_equal(found: list[Tensor], expected: list[Tensor], what: str) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other.detach()), f"{what}: tensor {index} differs by {(one - other).abs().max()}"


def _every_way(preset: str) -> None:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    expected = _reference(preset)
    last = dict.fromkeys(NAMES, world_size - 1)
    turns = {name: index % world_size for index, name in enumerate(NAMES)}
    for wave_bytes, owners, transport in itertools.product((1, 600, 2**20), (None, last, turns), ("all_to_all", "all_gather")):
        found, optimizer = _sharded_result(mesh, preset=preset, wave_bytes=wave_bytes, owners=owners, transport=transport)
        (plan,) = optimizer.plans
        what = f"{preset}, {world_size} ranks, {len(plan.waves)} waves, {owners and sorted(set(owners.values()))}, {transport}"
        _assert_equal(found, expected, what)
        assert optimizer.bytes_sent == NUM_STEPS * int(plan.bytes_sent_by_rank[dist.get_rank()]), what
        assert optimizer.num_collectives == NUM_STEPS * plan.num_collectives, what
        if world_size > 1 and transport == "all_to_all":
            assert plan.num_collectives <= 2 * len(plan.waves), what
        assert (len(plan.waves) == 1) == (wave_bytes == 2**20), what


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("preset", ["torch", "omn"])
def test_weights_are_bitwise_those_of_one_process(world_size: int, preset: str) -> None:
    run_ranks(world_size, _every_way, preset)


def _replicated(preset: str) -> None:
    expected = _reference(preset)
    for wave_bytes in (1, 2**20):
        found, optimizer = _sharded_result(None, preset=preset, wave_bytes=wave_bytes, process_group=dist.group.WORLD)
        _assert_equal(found, expected, f"replicated, {wave_bytes}")
        (plan,) = optimizer.plans
        assert optimizer.bytes_sent == NUM_STEPS * int(plan.bytes_sent_by_rank[dist.get_rank()])
        assert len(set(plan.owners)) == min(dist.get_world_size(), len(MATRIX_SHAPES))


@pytest.mark.parametrize("preset", ["torch", "omn"])
def test_replicated_matrices_are_shared_out_and_agree(preset: str) -> None:
    run_ranks(3, _replicated, preset)


@pytest.mark.parametrize("preset", ["torch", "omn"])
def test_plain_tensors_in_one_process(preset: str) -> None:
    torch.set_num_threads(1)
    found, _ = _sharded_result(None, preset=preset)
    _assert_equal(found, _reference(preset), "plain")


def _agreement() -> list[bytes]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrices, vectors, optimizer = _build(mesh, preset="omn")
    seen = []
    for step in range(100):
        for parameter, gradient in zip([*matrices, *vectors], itertools.chain(*_gradients(step)), strict=True):
            set_gradient(parameter, gradient)
        optimizer.step()
        seen.append(b"".join(whole(parameter).numpy().tobytes() for parameter in (*matrices, *vectors)))
    return seen


@pytest.mark.parametrize("preset", ["torch", "omn"])
@pytest.mark.parametrize("fault", ["no update", "half of the update", "momentum of the last step", "scale of the transpose"])
def test_the_comparison_fails_when_the_code_is_wrong(monkeypatch: pytest.MonkeyPatch, preset: str, fault: str) -> None:
    from omn_dist.optim.rules import muon

    prepare, lr = muon.Muon.prepare, muon.adjusted_lr

    def forget_momentum(*arguments: Any, commit: bool) -> None:
        prepare(*arguments, commit=False)

    if fault == "no update":
        monkeypatch.setattr(muon.Muon, "apply", lambda *rest: None)
    elif fault == "half of the update":
        monkeypatch.setattr(muon, "adjusted_lr", lambda *arguments: 0.5 * lr(*arguments))
    elif fault == "momentum of the last step":
        monkeypatch.setattr(muon.Muon, "prepare", forget_momentum)
    else:
        monkeypatch.setattr(muon, "adjusted_lr", lambda rate, mode, rows, columns: lr(rate, mode, columns, rows))
    torch.set_num_threads(1)
    found, _ = _sharded_result(None, preset=preset)
    with pytest.raises(AssertionError, match="differs by"):
        _assert_equal(found, _reference(preset), "mutated")


def test_ranks_agree_after_every_one_of_100_steps() -> None:
    first, *others = run_ranks(4, _agreement)
    assert len(set(first)) == 100, "weights must move at every step"
    for other in others:
        assert other == first


def _differing_plans() -> str:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="differ") as caught:
        _build(mesh, wave_bytes=1 if dist.get_rank() else 2**20)
    return str(caught.value)


def test_ranks_with_different_plans_all_raise() -> None:
    messages = run_ranks(2, _differing_plans)
    assert messages[0] == messages[1]
    assert "ranks 0 and 1 of 2 differ" in messages[0]
