"""Faults of routing and views that users of other optimizers report, each with the right value."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omn_dist import DualOptimizer, build_parameter_groups
from omn_dist.roles import declare_view, format_groups, route_parameters


def _update(shape: tuple[int, ...], gradient: Tensor, **fields: Any) -> Tensor:
    """What one step of rate 1 subtracts from a parameter."""
    parameter = nn.Parameter(torch.zeros(shape))
    optimizer = DualOptimizer(
        [{"params": [parameter], "algorithm": "muon", "lr": 1.0, "weight_decay": 0.0, **fields}], preset="omn"
    )
    parameter.grad = gradient.clone()
    optimizer.step()
    return -parameter.detach()


def _gaussian(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# --- wrong maths without an error -----------------------------------------------------------------


@pytest.mark.parametrize(("scale", "factor"), [("sqrt(max(1, m/n))", 2.0), ("0.2*sqrt(max(m, n))", 0.2 * 32**0.5)])
@pytest.mark.parametrize(
    ("stored", "fields"),
    [
        ((32, 8), {}),
        # Not 2.83 of the fused tensor, and not 1 of the stored orientation.
        ((64, 8), {"muon_shape": (2, 32, 8)}),
        ((8, 32), {"muon_shape": (32, 8), "muon_transposed": True}),
        ((4, 32, 8), {"muon_shape": (4, 32, 8)}),
        ((4, 8, 32), {"muon_shape": (4, 32, 8), "muon_transposed": True}),
        ((32, 2, 2, 2), {"muon_shape": (32, 8)}),
    ],
)
def test_the_shape_factor_is_that_of_the_matrix(scale: str, factor: float, stored: tuple[int, ...], fields: dict[str, Any]) -> None:
    gradient = _gaussian(*stored)
    scaled, plain = (_update(stored, gradient, scale=mode, **fields) for mode in (scale, "1"))
    assert float(scaled.norm() / plain.norm()) == pytest.approx(factor, rel=1e-5)


def test_fused_blocks_of_different_size_get_equal_updates() -> None:
    sizes = {"muon_shape": (24, 16), "muon_split_sizes": (8, 8, 8)}
    gradient = _gaussian(24, 16) * torch.tensor([10.0, 1.0, 0.1]).repeat_interleave(8)[:, None]
    by_view, as_one = _update((24, 16), gradient, **sizes), _update((24, 16), gradient)
    for block, part in zip(by_view.split(8), gradient.split(8), strict=True):
        assert torch.equal(block, _update((8, 16), part))
    norms = torch.stack([block.norm() for block in by_view.split(8)])
    assert float(norms.max() / norms.min()) < 1.1
    assert float(as_one.split(8)[2].norm() / as_one.split(8)[0].norm()) < 0.5, "the fault itself"


def test_experts_are_separate_matrices() -> None:
    gradient = _gaussian(4, 8, 16)
    update = _update((4, 8, 16), gradient, muon_shape=(4, 8, 16))
    assert float(update.norm()) == pytest.approx(5.34, rel=0.03)
    for expert, part in zip(update, gradient, strict=True):
        assert torch.equal(expert, _update((8, 16), part))
    assert float(_update((32, 16), gradient.view(32, 16), scale="1").norm()) < 4, "flattened"


class WithConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, 6, 3)
        self.grouped = nn.Conv2d(4, 6, 3, groups=2)
        self.depthwise = nn.Conv1d(4, 4, 3, groups=4)
        self.stack = nn.Parameter(torch.ones(3, 4, 5))
        self.out = nn.Linear(6, 6, bias=False)


def test_convolution_or_stack_is_chosen_and_never_guessed() -> None:
    model = WithConvolutions()
    with pytest.warns(UserWarning, match=r"1 of 8 parameters hold several matrices.*stack.*declare_view"):
        build_parameter_groups(model)
    routes = {route.name: route for route in route_parameters(model)}
    assert {name for name, route in routes.items() if route.algorithm == "muon"} == {"out.weight"}
    assert "depthwise" in routes["depthwise.weight"].reason
    for name, view in (("patch", "(6, 36)"), ("grouped", "(2, 3, 18)")):
        chosen = {route.name: route for route in route_parameters(model, {f"{name}.weight": "muon"})}[f"{name}.weight"]
        assert (chosen.algorithm, str(chosen.view)) == ("muon", view)
    for name in ("depthwise.weight", "stack"):
        with pytest.raises(ValueError, match=f"asks for muon on {name} of shape .*expected a matrix"):
            route_parameters(model, {name: "muon"})
    declare_view(model, (3, 4, 5), parameter="stack")
    assert {route.name for route in route_parameters(model) if route.algorithm == "muon"} == {"out.weight", "stack"}


# --- wrong optimizer, lost groups -----------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = declare_on(nn.Linear(8, 24, bias=False))
        self.gate_up_proj = nn.Linear(8, 32, bias=False)
        self.down_proj = nn.Linear(16, 8, bias=False)
        self.norm = nn.RMSNorm(8)


def declare_on(linear: nn.Linear) -> nn.Linear:
    declare_view(
        linear, (2, 12, 8), split_sizes=(8, 4), split_names=("qkv", "gate"), split_algorithms=("muon", "adamw"), joined_axes=(0,)
    )
    return linear


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(8, 16, bias=False)


def _fields(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def test_groups_are_the_same_on_meta() -> None:
    with torch.device("meta"):
        meta = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = build_parameter_groups(meta, weight_decay=0.1)
    assert _fields(groups) == _fields(build_parameter_groups(Model(), weight_decay=0.1))
    assert [len(group["params"]) for group in groups if group["algorithm"] == "muon"] == [2, 2, 2]


def test_a_rate_of_zero_leaves_every_bit() -> None:
    model = Model()
    optimizer = DualOptimizer(build_parameter_groups(model), lr=0.0, adamw_lr=0.0, preset="omn")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before, strict=True))
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}


def test_the_summary_shows_what_a_matrix_that_is_excluded_gets() -> None:
    model = Model()
    groups = build_parameter_groups(model, weight_decay=0.1, rules={"*.down_proj.weight": "adamw"})
    optimizer = DualOptimizer(groups, lr=0.02, adamw_lr=0.003, preset="omn")
    table = format_groups(optimizer.param_groups, model)
    lines = [line.split() for line in table.splitlines()]
    # Algorithm, decay, rate, tensors, entries, elements. The rows of the gate have their own line.
    assert ["Muon", "0.1", "0.02", "2", "2", "256"] in [line[:6] for line in lines]
    assert ["AdamW", "0.1", "0.003", "0", "0", "128"] in [line[:6] for line in lines]
    excluded = next(line for line in lines if "layers.0.down_proj.weight" in line)
    assert excluded[:6] == ["AdamW", "0.1", "0.003", "2", "2", "256"]
    assert lines[-1][:4] == ["total", "10", "10", "1,424"]


class WithFactors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8, bias=False)
        self.lora_A = nn.Linear(8, 2, bias=False)
        self.lora_B = nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.lora_B(self.lora_A(x))
        return output


def test_frozen_weights_have_no_state_and_keep_their_bits() -> None:
    model = WithFactors()
    model.base.weight.requires_grad_(False)
    before = model.base.weight.detach().clone()
    with pytest.warns(UserWarning, match="no matrix for Muon among 2"):
        groups = build_parameter_groups(model)
    assert [group["param_names"] for group in groups] == [["lora_A.weight", "lora_B.weight"]]
    assert {route.role for route in route_parameters(model)} == {"low_rank"}
    optimizer = DualOptimizer(groups, preset="omn")
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    assert set(optimizer.state) == {model.lora_A.weight, model.lora_B.weight}
    assert torch.equal(model.base.weight, before)
    both = build_parameter_groups(model, rules={"lora_*": "muon"})
    assert [group["algorithm"] for group in both] == ["muon"]


def test_a_step_after_a_forward_alone_changes_nothing() -> None:
    """As with torch's optimizers: a training step may have had nothing to learn from."""
    model = WithFactors()
    optimizer = DualOptimizer(build_parameter_groups(model), preset="omn")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.ones(3, 8))
    optimizer.step()
    assert all(torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before, strict=True))
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())


# --- experts that no token chose ------------------------------------------------------------------


def test_an_inactive_expert_is_left_untouched() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))})
    optimizer = DualOptimizer(build_parameter_groups(model, weight_decay=0.1), preset="omn")
    parameters = list(model.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters[:2]:
        parameter.grad = torch.ones_like(parameter) + torch.eye(8)
    optimizer.step()
    assert [torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True)] == [False, False, True]
    assert not bool(optimizer.state[parameters[2]]["momentum_buffer"].any())
