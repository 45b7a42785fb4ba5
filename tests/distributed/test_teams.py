"""Teams of ranks on one matrix: near the whole-matrix update, as far from exact arithmetic as it is, the same in every run."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import set_gradient, sharded, whole, whole_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from omn_dist import DualOptimizer

# Wide, tall, square; long sides that 2, 3 and 4 do not divide; short sides that they do not divide; a side shorter than a team.
SHAPES = {"wide": (24, 130), "tall": (131, 24), "square": (47, 47), "thin": (2, 65), "whole": (16, 40), "last": (33, 97)}
NUM_STEPS = 3
TEAMS: dict[int, dict[str, list[int]]] = {
    2: {"wide": [0, 1], "tall": [0, 1], "square": [0, 1], "thin": [0, 1]},
    3: {"wide": [0, 1, 2], "tall": [0, 2], "square": [0, 1], "thin": [1, 2]},
    # Rings of teams, each of which shares a rank with two others.
    4: {"wide": [0, 1], "tall": [1, 2], "square": [2, 3], "thin": [0, 3], "last": [0, 1, 2, 3]},
}


def _build(teams: Any, placements: Sequence[Any] = (Shard(0),), **options: Any) -> tuple[dict[str, nn.Parameter], DualOptimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = whole_tensors(list(SHAPES.values()), 0)
    parameters = {name: sharded(weight, mesh, placements) for name, weight in zip(SHAPES, weights, strict=True)}
    vectors = [sharded(tensor, mesh) for tensor in whole_tensors([(9,), (4, 4)], 1)]
    groups = [
        {"params": list(parameters.values()), "param_names": list(parameters), "algorithm": "muon", "weight_decay": 0.1},
        {"params": vectors, "param_names": ["d", "e"], "algorithm": "adamw"},
    ]
    return parameters, DualOptimizer(groups, teams=teams, **options)


def _run(teams: Any, **options: Any) -> tuple[dict[str, Tensor], DualOptimizer]:
    """Updates of the last step in units of the learning rate, then weights and momentum."""
    parameters, optimizer = _build(teams, **options)
    found: dict[str, Tensor] = {}
    for step in range(NUM_STEPS):
        gradients = whole_tensors(list(SHAPES.values()), 100 + step)
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            set_gradient(parameter, gradient)
        optimizer.step()
    for name, parameter in parameters.items():
        found[name] = whole(parameter)
        found[f"{name}.momentum"] = whole(optimizer.state[parameter]["momentum_buffer"])
    return found, optimizer


def _whole_and_teams(options: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    teams = TEAMS[world_size]
    expected, _ = _run("never", **options)
    found, optimizer = _run(teams, **options)
    again, _ = _run(teams, **options)
    (plan,) = optimizer.plans
    assert plan.teams == {name: tuple(team) for name, team in teams.items()}
    assert optimizer.bytes_sent == NUM_STEPS * plan.bytes_sent_by_rank[rank]
    assert optimizer.num_collectives == NUM_STEPS * (plan.num_collectives + plan.team_collectives_by_rank[rank])
    return expected, found, again


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("options"), [{"preset": "omn"}, {"preset": "torch"}], ids=str)
def test_try(world_size: int, options: dict[str, Any]) -> None:
    results = run_ranks(world_size, _whole_and_teams, options)
    for expected, found, again in results:
        for name, tensor in expected.items():
            print(name, (found[name] - tensor).abs().max(), tensor.abs().max())
            assert torch.equal(found[name], again[name])
