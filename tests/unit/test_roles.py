"""Roles and groups: each parameter once, with the right algorithm, and clear errors."""

import warnings

import pytest
import torch
from torch import nn

from omn_dist import build_parameter_groups
from omn_dist.models.omn import OMN, OMNConfig
from omn_dist.roles import algorithms, declare_view, format_groups, route_parameters
from omn_dist.roles.algorithms import AlgorithmKind, algorithm_kind, known_algorithms, register_algorithm
from omn_dist.roles.report import format_routes
from omn_dist.roles.role import plain_name
from omn_dist.settings import SettingsError


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=True), nn.Linear(width, width, bias=False)
        self.q_norm = nn.RMSNorm(width)


class MyScaleNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width, width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.custom_norm = nn.LayerNorm(width), MyScaleNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.ModuleDict({"gate": nn.Linear(width, 4), "up": nn.Linear(width, 2 * width)})
        self.shared_expert_gate = nn.Linear(width, 2)
        self.query = nn.Linear(width, 1)
        self.conv = nn.Conv1d(width, width, 3, groups=width)


class Transformer(nn.Module):
    def __init__(self, width: int = 8, tied: bool = True) -> None:
        super().__init__()
        self.lm_head = nn.Linear(width, 20, bias=False)
        self.wte, self.wpe = nn.Embedding(20, width), nn.Embedding(16, width)
        self.position_table = nn.Parameter(torch.zeros(16, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        if tied:
            self.lm_head.weight = self.wte.weight


def test_module_type_decides_first_and_name_second() -> None:
    roles = {route.name.removeprefix("blocks.0."): route.role for route in route_parameters(Transformer(tied=False))}
    assert {name: roles[name] for name in roles if not name.startswith("blocks.")} == {
        "lm_head.weight": "head",
        "wte.weight": "embedding",
        "wpe.weight": "embedding",
        "position_table": "position",
        "norm.weight": "norm",
        "norm.bias": "norm",
        "custom_norm.gain": "norm",
        "attention.q_proj.weight": "projection",
        "attention.q_proj.bias": "bias",
        "attention.o_proj.weight": "projection",
        "attention.q_norm.weight": "norm",
        "mlp.gate.weight": "router",
        "mlp.gate.bias": "bias",
        "mlp.up.weight": "projection",
        "mlp.up.bias": "bias",
        "shared_expert_gate.weight": "gate",
        "shared_expert_gate.bias": "bias",
        "query.weight": "vector",
        "query.bias": "bias",
        "conv.weight": "convolution",
        "conv.bias": "bias",
    }


@pytest.mark.parametrize(
    "name", ["embed_tokens", "wte", "tok_embeddings", "lm_head", "output", "score", "head", "gate", "shared_expert_gate"]
)
def test_names_that_must_never_reach_muon(name: str) -> None:
    kind = nn.Embedding if name in ("embed_tokens", "wte", "tok_embeddings") else nn.Linear
    model = nn.ModuleDict({"mlp": nn.ModuleDict({name: kind(8, 8)}), "proj": nn.Linear(8, 8)})
    on_muon = [route.name for route in route_parameters(model) if route.algorithm == "muon"]
    assert on_muon == ["proj.weight"]


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    model = Transformer()
    model.blocks[0].attention.o_proj.weight.requires_grad_(False)
    groups = build_parameter_groups(model, weight_decay=0.1)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == trainable
    by_name = dict(model.named_parameters())
    for group in groups:
        assert all(by_name[name] is parameter for name, parameter in zip(group["param_names"], group["params"], strict=True))
    assert [(group["algorithm"], group["weight_decay"]) for group in groups] == [("muon", 0.1), ("adamw", 0.1), ("adamw", 0.0)]


def test_a_tied_weight_is_an_embedding_whatever_its_first_name() -> None:
    (route,) = [route for route in route_parameters(Transformer(tied=True)) if "wte.weight" in route.names]
    assert route.names == ("lm_head.weight", "wte.weight")
    assert route.role == "embedding"
    assert not route.has_decay


def test_names_are_the_same_on_meta_and_inside_wrappers() -> None:
    with torch.device("meta"):
        meta = Transformer()
    real = Transformer()
    assert [group["param_names"] for group in build_parameter_groups(meta)] == [
        group["param_names"] for group in build_parameter_groups(real)
    ]
    wrapped = torch.compile(real)
    assert [group["param_names"] for group in build_parameter_groups(wrapped)] == [
        group["param_names"] for group in build_parameter_groups(real)
    ]
    assert plain_name("layers.0._checkpoint_wrapped_module.q.weight") == "layers.0.q.weight"
    assert plain_name("module.layers.0.q.weight") == "layers.0.q.weight"


def test_nothing_trainable_is_an_error_and_no_matrix_a_warning() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_parameter_groups(nn.Linear(4, 4).requires_grad_(False))
    with pytest.warns(UserWarning, match="no matrix for Muon among 2"):
        build_parameter_groups(nn.LayerNorm(4))


def test_rules_override_and_are_checked() -> None:
    model = Transformer()
    groups = build_parameter_groups(model, rules={"*.q_proj.weight": "adamw"})
    assert "blocks.0.attention.q_proj.weight" not in groups[0]["param_names"]
    for rules, message in (
        ({"*.qproj.*": "adamw"}, r"'\*.qproj.\*' matches no"),
        ({"*.q_proj.weight": "adamw", "*_proj.weight": "muon"}, "different algorithms"),
        ({"*.conv.weight": "muon"}, "expected a matrix"),
        ({"*.q_proj.weight": "sgd"}, r"'\*.q_proj.weight' asks for an unknown algorithm 'sgd' \(known: adamw, .*muon"),
        ({"*.q_proj.weight": "mun"}, "unknown algorithm 'mun'; did you mean 'muon'"),
    ):
        with pytest.raises(ValueError, match=message):
            build_parameter_groups(model, rules=rules)


@pytest.fixture
def more_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two algorithms that only these tests know: one for matrices, one for everything else."""
    monkeypatch.setattr(algorithms, "_KINDS", dict(algorithms._KINDS))
    register_algorithm("my_matrix_rule", AlgorithmKind("MyMatrixRule", takes_matrices=True))
    register_algorithm("my_shard_rule", AlgorithmKind("MyShardRule", takes_matrices=False))


@pytest.mark.usefixtures("more_algorithms")
def test_rules_may_name_any_registered_algorithm() -> None:
    model = Transformer()
    declare_view(model.blocks[1].mlp["up"], (2, 8, 8))
    rules = {"*.mlp.up.weight": "my_matrix_rule", "*.mlp.gate.*": "my_shard_rule", "*.custom_norm.gain": "my_shard_rule"}
    groups = build_parameter_groups(model, weight_decay=0.1, rules=rules)
    fields = [(group["algorithm"], group["weight_decay"], group.get("muon_shape"), len(group["params"])) for group in groups]
    # Of each block, Muon gets two projections, and AdamW decays the expert gate and convolution.
    assert fields[:-1] == [
        ("muon", 0.1, None, 4),
        ("my_matrix_rule", 0.1, None, 1),
        ("my_matrix_rule", 0.1, (2, 8, 8), 1),
        ("adamw", 0.1, None, 4),
        ("adamw", 0.0, None, 21),
        ("my_shard_rule", 0.1, None, 2),
    ]
    assert fields[-1] == ("my_shard_rule", 0.0, None, 4)
    labels = [line.split()[0] for line in format_groups(groups, model).splitlines()[1:]]
    assert labels == ["Muon", "MyMatrixRule", "MyMatrixRule", "AdamW", "AdamW", "MyShardRule", "MyShardRule", "total"]
    assert {"MyMatrixRule", "MyShardRule"} <= set(format_routes(route_parameters(model, rules)).split())


@pytest.mark.usefixtures("more_algorithms")
def test_an_algorithm_is_registered_once() -> None:
    kind = algorithm_kind("my_shard_rule")
    register_algorithm("my_shard_rule", kind)
    assert algorithm_kind("my_shard_rule") is kind
    assert {"adamw", "muon", "my_matrix_rule", "my_shard_rule"} <= set(known_algorithms())
    with pytest.raises(SettingsError, match=r"algorithm 'my_shard_rule': found .* registered as .*choose another name"):
        register_algorithm("my_shard_rule", AlgorithmKind("MyShardRule", takes_matrices=True))
    with pytest.raises(SettingsError, match="unknown algorithm 'my_shard_rul'; did you mean 'my_shard_rule'"):
        algorithm_kind("my_shard_rul")


def test_the_table_counts_what_a_state_dict_holds() -> None:
    with torch.device("meta"):
        model = OMN(OMNConfig.omn_1())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = build_parameter_groups(model, weight_decay=0.0)
    table = [line.split() for line in format_groups(groups, model).splitlines()]
    assert table[1][:2] == ["Muon", "0"]
    assert table[1][3:7] == ["196", "196", "1,240,465,408", "82.5216%"]
    assert table[2][:6] == ["AdamW", "-", "-", "0", "0", "0"]
    assert table[2][-1] == "(none)"
    assert table[3][3:7] == ["86", "87", "262,734,848", "17.4784%"]
    assert table[4][1:4] == ["282", "283", "1,503,200,256"]
    assert len(model.state_dict()) == 283
