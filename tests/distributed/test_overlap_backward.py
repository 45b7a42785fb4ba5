"""Directions that leave during backward: the bits of a step without, whatever happens between backward and step."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from omn_dist import DualOptimizer, build_parameter_groups
from omn_dist.algorithms import lists

NUM_LAYERS, WIDTH = 6, 12
WINDOWS = 6
REJECTED = 2
"""The window that no step follows."""


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(WIDTH, 20), "down": nn.Linear(20, WIDTH)}) for _ in range(NUM_LAYERS)
        )
        # Never used, and in the first wave by its name: that one waits for the step.
        self.absent = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["down"](torch.tanh(layer["up"](x)))
        return x


def _sharded(kind: str) -> _Model:
    torch.manual_seed(0)
    model = _Model()
    axes = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=axes) if kind == "hsdp" else None
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        # Submodules of a ModuleDict are called one by one, so each is a unit of its own.
        for part in layer.values():
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _train(preset: str, kind: str, *, overlap: bool) -> tuple[list[Tensor], list[int], int]:
    """Weights and state at the end, how many gathers left in each backward, and all collectives."""
    model = _sharded(kind)
    optimizer = DualOptimizer(build_parameter_groups(model), preset=preset, wave_bytes=800)
    early = []
    for window in range(WINDOWS):
        optimizer.zero_grad()
        for micro_batch in range(2):
            last = micro_batch == 1
            model.set_requires_gradient_sync(last)
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * window + 10 * micro_batch + dist.get_rank()))
            before = optimizer.num_collectives
            with optimizer.overlap_backward() if overlap and last else nullcontext():
                model(x).square().mean().backward()
            if last:
                early.append(optimizer.num_collectives - before)
        if window == REJECTED:
            continue
        # Schedules and the clipping of AdamW come between backward and step.
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            if group["algorithm"] == "adamw":
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        # Of the local part, which shares a buffer, and so a version, with gradients of matrices.
                        parameter.grad.to_local().mul_(0.5)
        optimizer.step()
    tensors = [parameter.to_local().detach() for parameter in model.parameters()]
    for parameter in model.parameters():
        for key in sorted(optimizer.state[parameter]):
            value = optimizer.state[parameter][key]
            tensors.append(value.to_local() if hasattr(value, "to_local") else value)
    return tensors, early, optimizer.num_collectives


def _same_bits(preset: str, kind: str, together: bool = False) -> None:
    expected, none_early, num_collectives = _train(preset, kind, overlap=False)
    with patch.object(lists, "uses_multi_tensor", lambda device: together):
        found, early, with_overlap = _train(preset, kind, overlap=True)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"tensor {index} differs by {(one - other).abs().max()}"
    assert set(none_early) == {0}
    num_waves = num_collectives // (2 * (WINDOWS - 1))
    assert num_waves >= 4
    # The wave of the absent gradient leaves early from its owner only, which has nothing to say in it.
    assert set(early) <= {num_waves - 1, num_waves}, (early, num_waves)
    # The gathers of the rejected window were in vain.
    assert with_overlap == num_collectives + num_waves


@pytest.mark.parametrize(
    ("preset", "kind", "world_size"),
    [("torch", "fsdp", 2), ("omn", "fsdp", 3), ("normuon", "fsdp", 2), ("torch", "hsdp", 4)],
)
def test_bits_are_those_of_a_step_without_overlap(preset: str, kind: str, world_size: int) -> None:
    run_ranks(world_size, _same_bits, preset, kind)


@pytest.mark.parametrize(("preset", "world_size"), [("torch", 2), ("omn", 3), ("normuon", 2)])
def test_bits_are_the_same_where_rectangles_go_together_as_on_a_gpu(preset: str, world_size: int) -> None:
    run_ranks(world_size, _same_bits, preset, "fsdp", True)


def _changed(how: str) -> str:
    model = _sharded("fsdp")
    optimizer = DualOptimizer(build_parameter_groups(model), preset="torch")
    x = torch.ones(4, WIDTH)
    with optimizer.overlap_backward():
        model(x).square().mean().backward()
    weights = [parameter.to_local().detach().clone() for parameter in model.parameters()]
    if how == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    elif how == "accumulate":
        model(x).square().mean().backward()
    else:
        optimizer.zero_grad()
        model(x).square().mean().backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert all(torch.equal(one, parameter.to_local()) for one, parameter in zip(weights, model.parameters(), strict=True))
    # It works again from the next backward on.
    optimizer.zero_grad()
    with optimizer.overlap_backward():
        model(x).square().mean().backward()
    optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("how", ["clip", "accumulate", "another backward"])
def test_a_gradient_that_changed_after_it_left_is_refused(how: str) -> None:
    for message in run_ranks(2, _changed, how):
        assert "found another gradient than the one that left" in message


def _momentum_changed() -> str:
    model = _sharded("fsdp")
    optimizer = DualOptimizer(build_parameter_groups(model), preset="torch")
    with optimizer.overlap_backward():
        model(torch.ones(4, WIDTH)).square().mean().backward()
    for group in optimizer.param_groups:
        if group["algorithm"] == "muon":
            group["momentum"] = 0.5
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_a_momentum_that_changed_after_directions_left_is_refused() -> None:
    for message in run_ranks(2, _momentum_changed):
        assert "found {'momentum': 0.5, " in message


def _rolled_back() -> None:
    """A window whose directions left on uneven numbers of waves, then state that is loaded, then steps."""
    found = []
    for overlap in (False, True):
        model = _sharded("fsdp")
        optimizer = DualOptimizer(build_parameter_groups(model), preset="torch", wave_bytes=800)
        x = torch.ones(4, WIDTH)
        for window in range(3):
            optimizer.zero_grad()
            with optimizer.overlap_backward() if overlap else nullcontext():
                (model(x) - window).square().mean().backward()
            if window == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            else:
                optimizer.step()
        found.append([parameter.to_local().detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_state_may_be_loaded_while_directions_are_under_way() -> None:
    run_ranks(2, _rolled_back)


def _all_gather() -> None:
    optimizer = DualOptimizer(build_parameter_groups(_sharded("fsdp")), preset="torch", transport="all_gather")
    with pytest.raises(ValueError, match="found transport 'all_gather', expected 'all_to_all'"), optimizer.overlap_backward():
        pass


def test_one_transport_has_room_for_one_wave_only() -> None:
    run_ranks(2, _all_gather)


def test_plain_tensors_take_no_part() -> None:
    weight = nn.Parameter(torch.ones(4, 6))
    optimizer = DualOptimizer([{"params": [weight], "algorithm": "muon"}], preset="torch")
    with optimizer.overlap_backward():
        (weight * torch.randn(4, 6)).sum().backward()
    before = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, before)
