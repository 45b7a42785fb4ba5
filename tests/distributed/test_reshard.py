"""A checkpoint of one number of ranks, continued on another: state bitwise, and the next steps those of one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import OMNReference, is_shard_of, local_of, whole_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from omn_dist import DualOptimizer, build_parameter_groups
from omn_dist.train.checkpointing import load_checkpoint, read_saved_run, save_checkpoint
from omn_dist.train.schedule import TokenClock

SHAPES = {"wide": (10, 6), "short": (3, 6)}


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.short = nn.Linear(6, 10), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.short(tokens).sum() + self.wide(tokens).sum()


def _build() -> tuple[nn.Module, DualOptimizer]:
    torch.manual_seed(7)
    model = _Network()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, DualOptimizer(build_parameter_groups(model, weight_decay=0.0), preset="omn")


def _gradients(step: int) -> dict[str, Tensor]:
    named = dict(_Network().named_parameters())
    return dict(zip(named, whole_tensors([tuple(p.shape) for p in named.values()], 50 + step), strict=True))


def _step(model: nn.Module, optimizer: DualOptimizer, step: int) -> None:
    model(torch.ones(2, 6)).backward()
    for name, parameter in model.named_parameters():
        parameter.grad.to_local().copy_(local_of(_gradients(step)[name], parameter.device_mesh, parameter.placements))
    optimizer.step()
    optimizer.zero_grad()


def _reference(num_steps: int) -> tuple[OMNReference, dict[str, nn.Parameter], torch.optim.AdamW]:
    torch.manual_seed(7)
    model = _Network()
    named = dict(model.named_parameters())
    matrices = {name: parameter.detach() for name, parameter in named.items() if parameter.ndim == 2}
    vectors = {name: parameter for name, parameter in named.items() if parameter.ndim == 1}
    muon, adamw = OMNReference(matrices), torch.optim.AdamW(vectors.values(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(num_steps):
        gradients = _gradients(step)
        muon.step({name: gradients[name] for name in matrices})
        for name, parameter in vectors.items():
            parameter.grad = gradients[name]
        adamw.step()
    return muon, vectors, adamw


def _check(model: nn.Module, optimizer: DualOptimizer, num_steps: int) -> None:
    muon, vectors, adamw = _reference(num_steps)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if name in vectors:
            assert is_shard_of(parameter.detach(), vectors[name].detach()), name
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert is_shard_of(state[key], adamw.state[vectors[name]][key]), f"{name}.{key}"
        else:
            assert is_shard_of(parameter.detach(), muon.weights[name]), name
            assert is_shard_of(state["momentum_buffer"], muon.momentum[name]), name


def _save(folder: Path) -> None:
    model, optimizer = _build()
    for step in range(3):
        _step(model, optimizer, step)
    save_checkpoint(folder, model, optimizer, clock=TokenClock(steps=3), config={}, data_fingerprint="none", keep=1)


def _continue(folder: Path) -> None:
    model, optimizer = _build()
    load_checkpoint(read_saved_run(folder / "step_00000003"), model, optimizer)
    _check(model, optimizer, 3)
    for step in range(3, 5):
        _step(model, optimizer, step)
    _check(model, optimizer, 5)


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (2, 4), (4, 1), (1, 3)])
def test_another_number_of_ranks_continues_bitwise(tmp_path: Path, before: int, after: int) -> None:
    run_ranks(before, _save, tmp_path)
    run_ranks(after, _continue, tmp_path)
