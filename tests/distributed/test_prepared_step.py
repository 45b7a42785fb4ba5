"""A step is prepared once: what a program does to parameters, state and groups in between still counts."""

import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_optimizer import assert_same, fill_gradients, parameters_of, small_optimizer, snapshot
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from omn_dist import DualOptimizer
from omn_dist.optim.shards import MatrixRegion

CHANGES = ("memory of parameters", "memory of state", "state tensors", "values in place", "groups", "copies of groups")


def _exchange(tensor: Tensor) -> None:
    """Other memory behind the same tensor, with the same values."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        local.data = local.data.clone()
    else:
        tensor.data = tensor.data.clone()


def _change(optimizer: DualOptimizer, what: str) -> None:
    """A change that leaves all values as they are, or the same change on every layout."""
    for parameter in parameters_of(optimizer):
        state = optimizer.state[parameter]
        if what == "memory of parameters":
            _exchange(parameter)
        elif what == "memory of state":
            for value in state.values():
                _exchange(value)
        elif what == "state tensors":
            for key, value in state.items():
                state[key] = value.clone()
        elif what == "values in place":
            with torch.no_grad():
                parameter.mul_(0.5)
            for key in state.keys() & {"momentum_buffer", "exp_avg"}:
                state[key].mul_(2.0)
    for group in optimizer.param_groups:
        if what == "groups":
            group["lr"] *= 0.5
            group["weight_decay"] = 0.2
    if what == "copies of groups":
        optimizer.load_state_dict(optimizer.state_dict())


def _trained(preset: str, what: str, *, changed: bool) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    optimizer = small_optimizer(mesh, preset=preset)
    for step in range(3):
        if step and (changed or what in ("values in place", "groups")):
            _change(optimizer, what)
        fill_gradients(optimizer, step)
        optimizer.step()
    return snapshot(optimizer)


def _same_bits(preset: str, what: str) -> None:
    # A change of values needs no partner without it: the run on whole tensors makes the same one.
    assert_same(_trained(preset, what, changed=True), _trained(preset, what, changed=False))


@pytest.mark.parametrize("preset", ["torch", "normuon"])
@pytest.mark.parametrize("what", CHANGES)
def test_in_one_process(preset: str, what: str) -> None:
    torch.set_num_threads(1)
    _same_bits(preset, what)


def _every_change(preset: str) -> list[dict[str, Tensor]]:
    found = []
    for what in CHANGES:
        _same_bits(preset, what)
        found.append(_trained(preset, what, changed=True))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("preset", ["torch", "normuon"])
def test_on_ranks(preset: str) -> None:
    torch.set_num_threads(1)
    expected = [_trained(preset, what, changed=True) for what in CHANGES]
    for found in run_ranks(2, _every_change, preset):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


def _gradients_alive() -> list[bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    optimizer = small_optimizer(mesh, preset="normuon")
    fill_gradients(optimizer, 0)
    gradients = [weakref.ref(parameter.grad) for parameter in parameters_of(optimizer)]
    memory = [weakref.ref(_local(parameter.grad)) for parameter in parameters_of(optimizer)]
    optimizer.step()
    optimizer.zero_grad()
    return [found() is not None for found in (*gradients, *memory)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.distributed
def test_no_gradient_outlives_its_step() -> None:
    assert not any(_gradients_alive())
    for alive in run_ranks(2, _gradients_alive):
        assert not any(alive)


def test_views_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = MatrixRegion.__init__
    monkeypatch.setattr(MatrixRegion, "__init__", lambda self, *rest: (made.append(1), make(self, *rest))[1])
    optimizer = small_optimizer(preset="torch")
    for step in range(3):
        fill_gradients(optimizer, step)
        optimizer.step()
        if step == 0:
            region = next(iter(optimizer._built()[0].step._regions.values()))
            views = region.parameter, region.state["momentum_buffer"]
    assert len(made) == 3
    assert region.parameter is views[0]
    assert region.state["momentum_buffer"] is views[1]
    _exchange(parameters_of(optimizer)[0])
    _exchange(parameters_of(optimizer)[1])
    _exchange(parameters_of(optimizer)[2])
    fill_gradients(optimizer, 4)
    optimizer.step()
    assert region.parameter is not views[0]
