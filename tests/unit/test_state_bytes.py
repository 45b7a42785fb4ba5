"""Bytes of optimizer state: the formulas, and what optimizers really hold."""

import warnings

import pytest
import torch
from torch import nn

from omn_dist import DualOptimizer, build_parameter_groups, plan_ownership
from omn_dist.models.omn import OMN, OMNConfig
from omn_dist.optim.state_bytes import state_bytes, state_bytes_by_algorithm


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("adamw", 2 * 12 * 20 * 4 + 4), ("muon", 12 * 20 * 4), ("normuon", 12 * (20 + 1) * 4)]
)
def test_the_published_formulas(algorithm: str, expected: int) -> None:
    parameter = nn.Parameter(torch.zeros(12, 20))
    assert state_bytes(parameter, {"algorithm": algorithm}) == expected
    optimizer = DualOptimizer([{"params": [parameter], "algorithm": algorithm}], preset="omn")
    assert sum(value.numel() * value.element_size() for value in optimizer.state[parameter].values()) == expected


@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("algorithm", ["adamw", "muon", "normuon"])
def test_masters_and_rows_of_adamw_are_counted(algorithm: str, master_weights: bool) -> None:
    parameter = nn.Parameter(torch.zeros(12, 20, dtype=torch.bfloat16))
    group = {"params": [parameter], "algorithm": algorithm}
    if algorithm != "adamw":
        group |= {"muon_shape": (12, 20), "muon_split_sizes": (8, 4), "muon_split_algorithms": ("muon", "adamw")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = DualOptimizer([group], master_weights=master_weights, preset="omn")
    held = sum(value.numel() * value.element_size() for value in optimizer.state[parameter].values())
    assert state_bytes(parameter, optimizer.param_groups[0], master_weights=master_weights) == held


@pytest.mark.parametrize("preset", ["omn", "normuon"])
def test_a_model_holds_what_the_plan_says_on_meta(preset: str) -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    config = OMNConfig(**sizes, intermediate_size=48, vocab_size=64)
    with torch.device("meta"):
        groups = build_parameter_groups(OMN(config))
    algorithm = "normuon" if preset == "normuon" else "muon"
    planned = state_bytes_by_algorithm(groups, algorithm)
    optimizer = DualOptimizer(build_parameter_groups(OMN(config)), preset=preset)
    held: dict[str, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            count = sum(value.numel() * value.element_size() for value in optimizer.state[parameter].values())
            held[group["algorithm"]] = held.get(group["algorithm"], 0) + count
    assert held == planned
    assert list(planned) == [algorithm, "adamw"]


def test_row_numbers_are_part_of_the_planned_bytes() -> None:
    shapes = {"a": (12, 8)}
    muon, normuon = (plan_ownership(shapes, 3, algorithm=algorithm) for algorithm in ("muon", "normuon"))
    # Each of two other ranks sends 4 rows of the moment; gets 4 back, and a factor.
    assert int((normuon.bytes_sent_by_rank - muon.bytes_sent_by_rank).sum()) == 2 * 4 * (4 + 4 + 1)
    assert muon.hash != normuon.hash
