"""What DualOptimizer refuses, and that nothing is changed when it does."""

import re
from typing import Any

import pytest
import torch
from small_optimizer import assert_same, fill_gradients, parameters_of, small_optimizer, snapshot
from torch import nn

from omn_dist import PRESETS, DualOptimizer
from omn_dist.settings import SettingsError


def _matrix() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([], {}, "groups: found none"),
        ([{"params": [_matrix()]}], {}, "found no 'algorithm'"),
        ([{"params": [_matrix()], "algorithm": "moun"}], {}, "did you mean 'muon'"),
        ([{"params": [_matrix()], "algorithm": "muon", "momentun": 0.9}], {}, "did you mean 'momentum'"),
        ([{"params": [_matrix()], "algorithm": "muon"}], {"preset": "onm"}, "did you mean 'omn'"),
        ([{"params": [_matrix()], "algorithm": "muon"}], {"momentim": 0.9}, "did you mean 'momentum'"),
        ([{"params": [_matrix()], "algorithm": "muon"}], {"lr": -1.0}, "lr: found -1.0"),
        ([{"params": [_matrix()], "algorithm": "muon"}], {"lr": "fast"}, "lr: found 'fast', expected float"),
        ([{"params": [_matrix()], "algorithm": "muon"}], {"transport": "carrier"}, "unknown transport"),
        ([{"params": [_matrix()], "algorithm": "muon"}], {"wave_bytes": 0}, "wave_bytes: found 0"),
        ([{"params": [_matrix()], "algorithm": "muon"}], {"owners": {"x": 0}}, "'x' is in one of owners and matrices only"),
        ([{"params": [nn.Parameter(torch.ones(4))], "algorithm": "muon"}], {}, "expected a matrix"),
        ([{"params": [nn.Parameter(torch.ones(2, 2, device="meta"))], "algorithm": "muon"}], {}, "meta device"),
        (
            [{"params": [nn.Parameter(torch.ones(2, 4, 3).mT)], "algorithm": "muon", "muon_shape": (2, 3, 4)}],
            {},
            "strides (12, 1, 3), expected leading dims",
        ),
    ],
)
def test_mistakes_are_one_clear_line(groups: list[dict[str, Any]], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        DualOptimizer(groups, **options)
    assert "\n" not in str(caught.value)


def test_a_group_without_parameters_is_no_mistake() -> None:
    vector = nn.Parameter(torch.ones(4))
    optimizer = DualOptimizer([{"params": [], "algorithm": "muon"}, {"params": [vector], "algorithm": "adamw"}])
    vector.grad = torch.ones(4)
    optimizer.step()
    assert bool((vector < 1).all())
    assert optimizer.plans == ()


def test_explicit_zeros_are_kept() -> None:
    optimizer = DualOptimizer(
        [{"params": [_matrix()], "algorithm": "muon", "weight_decay": 0.0, "momentum": 0.0, "lr": 0.0}], preset="torch"
    )
    group = optimizer.param_groups[0]
    assert (group["weight_decay"], group["momentum"], group["lr"]) == (0.0, 0.0, 0.0)


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    optimizer = small_optimizer()
    with pytest.raises(ValueError, match="expected a matrix"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "param_names": ["x"], "algorithm": "muon"})
    assert len(optimizer.param_groups) == 2


def test_a_group_that_cannot_be_planned_leaves_the_optimizer_as_it_was() -> None:
    optimizer = small_optimizer(preset="torch")
    extra = {"params": [nn.Parameter(torch.ones(4, 4))], "param_names": ["a"], "algorithm": "muon"}
    with pytest.raises(ValueError, match="parameter a: two parameters of this name"):
        optimizer.add_param_group(extra)
    assert len(optimizer.param_groups) == 2
    assert len(optimizer.state) == 5
    fill_gradients(optimizer, 0)
    optimizer.step()


def test_a_vector_without_elements_is_taken() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(size))], "param_names": [f"v{size}"], "algorithm": "vector"} for size in (0, 3)]
    for own in (groups, groups[:1]):
        optimizer = DualOptimizer(own, preset="torch")
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones_like(group["params"][0])
        optimizer.step()
    assert optimizer.state[groups[0]["params"][0]]["momentum_buffer"].shape == (0,)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_gradient_that_does_not_fit_is_refused_before_anything_moves() -> None:
    optimizer = small_optimizer()
    before = snapshot(optimizer)
    fill_gradients(optimizer, 0)
    embedding = parameters_of(optimizer)[4]
    embedding.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 4), (4, 4))
    with pytest.raises(ValueError, match=r"parameter e: found a gradient of layout torch.sparse_coo"):
        optimizer.step()
    assert_same(before, snapshot(optimizer))


def test_unknown_preset_field_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="adamw_lr"):
        small_optimizer(adam_lr=1.0)
    assert PRESETS["omn"].lr == 0.01
