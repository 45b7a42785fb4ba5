"""Rules by role, pattern, module and class, with any field of a group."""

from typing import Any

import pytest
import torch
from torch import nn

from omn_dist import DualOptimizer, build_parameter_groups
from omn_dist.roles import route_parameters
from omn_dist.settings import SettingsError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"proj": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}) for _ in range(2))
        self.lm_head = nn.Linear(8, 20, bias=False)


def _by_name(groups: list[dict[str, Any]], field: str) -> dict[str, Any]:
    return {name: group.get(field) for group in groups for name in group["param_names"]}


def test_roles_get_rates_of_their_own() -> None:
    rules = {"embedding": {"lr": 0.3, "betas": [0.8, 0.9]}, "head": {"lr": 0.004}, "wpe*": {"lr": 0.1}}
    model = Model()
    for optimizer in (
        DualOptimizer(model, rules=rules, lr=0.02),
        DualOptimizer(build_parameter_groups(model, rules=rules), lr=0.02),
    ):
        rates = _by_name(optimizer.param_groups, "lr")
        assert rates.pop("wte.weight") == 0.3
        assert rates.pop("wpe.weight") == 0.1
        assert rates.pop("lm_head.weight") == 0.004
        assert set(rates.values()) == {0.02}
        betas = _by_name(optimizer.param_groups, "betas")
        assert betas["wte.weight"] == betas["wpe.weight"] == (0.8, 0.9)
        assert betas["lm_head.weight"] == (0.9, 0.95)
        assert {group["weight_decay"] for group in optimizer.param_groups if group["algorithm"] == "adamw"} == {0.0}


def test_each_rate_moves_its_parameters_and_a_schedule_scales_all() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = DualOptimizer(model, rules={"embedding": {"lr": 0.25}, "head": {"lr": 0.5}}, lr=0.125, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.5)
    for factor in (1.0, 0.5):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scheduler.step()
        for name, rate in (("wte.weight", 0.25), ("lm_head.weight", 0.5), ("blocks.0.norm.weight", 0.125)):
            moved = before[name] - dict(model.named_parameters())[name].detach()
            # Equal gradients make AdamW's steps lr / (1 + eps).
            assert torch.allclose(moved, torch.full_like(moved, rate * factor), rtol=1e-5, atol=1e-6), name


def test_a_pattern_a_module_or_a_class_beats_a_role_field_by_field() -> None:
    model = Model()
    for rule in ("wpe.*", model.wpe):
        groups = build_parameter_groups(model, rules={"embedding": {"lr": 0.3, "eps": 1e-6}, rule: {"lr": 0.1}})
        assert _by_name(groups, "lr")["wpe.weight"] == 0.1
        assert _by_name(groups, "lr")["wte.weight"] == 0.3
        assert _by_name(groups, "eps")["wpe.weight"] == 1e-6
    groups = build_parameter_groups(model, rules={"embedding": {"lr": 0.3}, nn.Embedding: {"lr": 0.1}})
    assert _by_name(groups, "lr")["wte.weight"] == 0.1
    with pytest.warns(UserWarning, match="no matrix for Muon"):
        groups = build_parameter_groups(
            model, rules={"norm": {"weight_decay": 0.1}, "projection": {"algorithm": "adamw", "lr": 0.5}}
        )
    assert _by_name(groups, "weight_decay")["blocks.0.norm.weight"] == 0.1
    assert {_by_name(groups, "algorithm")[f"blocks.{block}.proj.weight"] for block in (0, 1)} == {"adamw"}
    assert _by_name(groups, "lr")["blocks.1.proj.weight"] == 0.5


def test_groups_are_split_by_the_fields_and_keep_their_order() -> None:
    rules = {"blocks.0.proj.weight": {"ns_steps": 7}, "head": {"lr": 1.0}, "embedding": {"lr": 1.0}, "blocks.1.norm.*": {"lr": 2.0}}
    groups = build_parameter_groups(Model(), 0.1, rules=rules)
    assert [(group["algorithm"], group["weight_decay"], group["param_names"]) for group in groups] == [
        ("muon", 0.1, ["blocks.1.proj.weight"]),
        ("muon", 0.1, ["blocks.0.proj.weight"]),
        ("adamw", 0.0, ["blocks.0.proj.bias", "blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.1.proj.bias"]),
        ("adamw", 0.0, ["wte.weight", "wpe.weight", "lm_head.weight"]),
        ("adamw", 0.0, ["blocks.1.norm.weight", "blocks.1.norm.bias"]),
    ]
    reasons = {route.name: route.reason for route in route_parameters(Model(), rules)}
    assert reasons["wte.weight"] == "weight of Embedding; lr=1.0 by rule 'embedding'"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"wte.*": {"lr": 0.1}, "w*.weight": {"lr": 0.2}}, "different values of lr, 0.1 and 0.2"),
        ({"embeding": {"lr": 0.1}}, "did you mean 'embedding'"),
        ({"embedding": {"learning_rate": 0.1}}, "unknown field 'learning_rate'"),
        ({"embedding": {"beta": (0.9, 0.9)}}, "did you mean 'betas'"),
        ({"embedding": {"momentum": 0.9}}, "'embedding' gives wte.weight, which is on AdamW, an unknown field 'momentum'"),
        ({"embedding": 0.1}, "found 0.1 for 'embedding', expected an algorithm's name or a mapping"),
        ({"embedding": {"algorithm": "adam"}}, "did you mean 'adamw'"),
        ({3: "adamw"}, "found the key 3, expected a role"),
        (["embedding"], "expected a mapping of roles"),
        ({"*.nothing.*": {"lr": 0.1}}, "matches no trainable parameter"),
        ({"norm": "muon"}, "expected a matrix"),
    ],
)
def test_rules_that_cannot_be_applied_are_one_clear_line(rules: Any, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build_parameter_groups(Model(), rules=rules)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_equal_values_agree_and_a_role_that_no_parameter_has_is_a_warning() -> None:
    groups = build_parameter_groups(Model(), rules={"wte.*": {"lr": 0.1}, "w*.weight": {"lr": 0.1}})
    assert _by_name(groups, "lr")["wte.weight"] == 0.1
    with pytest.warns(UserWarning, match="no trainable parameter has the role 'router'; roles of this model are embedding, "):
        build_parameter_groups(Model(), rules={"router": {"lr": 0.1}})


def test_values_of_the_wrong_type_name_field_and_parameter() -> None:
    groups = build_parameter_groups(Model(), rules={"embedding": {"lr": "fast"}})
    with pytest.raises(SettingsError, match=r"lr: found 'fast', expected float \(group of wte.weight, wpe.weight\)"):
        DualOptimizer(groups)


def test_a_convolution_on_muon_by_its_role() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    (muon, _) = build_parameter_groups(model, rules={"convolution": {"algorithm": "muon", "lr": 0.1}})[:2]
    assert (muon["algorithm"], muon["lr"], muon["muon_shape"]) == ("muon", 0.1, (8, 27))
