"""The first line that people type: what DualOptimizer takes instead of groups, and what it says to the rest."""

import copy
import io
import logging
import re
import types
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from omn_dist import PRESETS, DualOptimizer, build_parameter_groups


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden).relu()
        return self.head(hidden)


def _fields(optimizer: DualOptimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _step(model: nn.Module, optimizer: DualOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(16)).square().mean().backward()
    optimizer.step()


def _matrix() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4))


# --- what is taken --------------------------------------------------------------------------------


def test_a_model_is_enough() -> None:
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    optimizer = DualOptimizer(model, lr=1e-2, weight_decay=0.2)
    same = DualOptimizer(build_parameter_groups(twin), preset="moonlight", lr=1e-2, weight_decay=0.2)
    assert _fields(optimizer) == _fields(same)
    for _ in range(3):
        _step(model, optimizer)
        _step(twin, same)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True))
    assert not torch.equal(model.blocks[0].weight, Model().blocks[0].weight)


def test_the_default_preset_has_one_rate() -> None:
    optimizer = DualOptimizer(Model())
    assert optimizer.preset == PRESETS["moonlight"]
    assert {group["lr"] for group in optimizer.param_groups} == {PRESETS["moonlight"].lr}


def test_groups_with_use_muon_are_understood(caplog: pytest.LogCaptureFixture) -> None:
    """The groups of Keller Jordan's MuonWithAuxAdam, with all keys that it takes."""
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    inner = [block.weight for block in model.blocks]
    rest = [parameter for parameter in model.parameters() if all(parameter is not weight for weight in inner)]
    groups = [
        {"params": inner, "use_muon": True, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.01},
        {"params": rest, "use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = DualOptimizer(groups, preset="torch")
    assert [(group["algorithm"], group["use_muon"], group["lr"]) for group in optimizer.param_groups] == [
        ("muon", True, 0.02),
        ("adamw", False, 3e-4),
    ]
    assert optimizer.param_groups[1]["eps"] == 1e-10
    twins = [block.weight for block in twin.blocks]
    muon = torch.optim.Muon(twins, lr=0.02, momentum=0.95, weight_decay=0.01)
    adamw = torch.optim.AdamW(
        [parameter for parameter in twin.parameters() if all(parameter is not weight for weight in twins)],
        lr=3e-4,
        betas=(0.9, 0.95),
        eps=1e-10,
        weight_decay=0.0,
    )
    for _ in range(3):
        _step(model, optimizer)
        for other in (muon, adamw):
            other.zero_grad()
        twin(torch.arange(16)).square().mean().backward()
        muon.step()
        adamw.step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True))


def test_rates_of_use_muon_groups_belong_to_another_scale(caplog: pytest.LogCaptureFixture) -> None:
    groups = [{"params": [_matrix()], "use_muon": True, "lr": 0.02}]
    with caplog.at_level(logging.WARNING, "omn_dist"):
        DualOptimizer([dict(groups[0], params=[_matrix()])], preset="torch")
        assert not caplog.messages
        DualOptimizer(groups)
    assert len(caplog.messages) == 1
    assert "preset='torch'" in caplog.messages[0]


def test_the_trainer_of_transformers_passes_the_model() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    trainer = types.SimpleNamespace(
        model=model,
        optimizer=None,
        optimizer_cls_and_kwargs=(DualOptimizer, {"model": model, "lr": 1e-3}),
        args=types.SimpleNamespace(weight_decay=0.1),
        get_decay_parameter_names=lambda model: [],
    )
    optimizer = transformers.Trainer.create_optimizer(trainer)
    assert isinstance(optimizer, DualOptimizer)
    assert _fields(optimizer) == _fields(DualOptimizer(model, lr=1e-3))


@pytest.mark.parametrize("scheduler", ["onecycle", "cyclic"])
def test_schedulers_that_cycle_momentum_work_with_their_defaults(scheduler: str) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        if scheduler == "onecycle":
            return OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        return CyclicLR(optimizer, base_lr=0.01, max_lr=0.1)

    model = Model()
    optimizer = DualOptimizer(model)
    assert optimizer.defaults == {"lr": 4.2e-4, "weight_decay": 0.1, "momentum": 0.95}
    assert ["momentum" in group for group in optimizer.param_groups] == [True, False]
    schedule(optimizer)
    expected = 0.95 if scheduler == "onecycle" else 0.9
    assert optimizer.param_groups[0]["momentum"] == expected
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.95)
    _step(model, optimizer)

    vectors = DualOptimizer([{"params": [nn.Parameter(torch.ones(4))], "algorithm": "adamw"}], adamw_betas=(0.8, 0.99))
    assert vectors.defaults == {"lr": 4.2e-4, "weight_decay": 0.1, "betas": (0.8, 0.99)}
    schedule(vectors)
    assert vectors.param_groups[0]["betas"] == (expected, 0.99)


def test_a_group_that_is_added_gets_no_field_of_another_rule() -> None:
    optimizer = DualOptimizer(Model())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], "param_names": ["x"], "algorithm": "adamw"})
    assert optimizer.param_groups[-1].keys() == optimizer.param_groups[1].keys()
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    again.add_param_group({"params": [_matrix()], "param_names": ["y"], "use_muon": True})
    assert again.param_groups[-1].keys() == {*optimizer.param_groups[0].keys(), "use_muon"}


def test_foreign_fields_stay_with_one_warning() -> None:
    foreign = {"name": "mine", "fused": True, "foreach": False, "capturable": False, "differentiable": False, "maximize": False}
    groups = [{**group, **foreign, "amsgrad": False, "layer": 3} for group in build_parameter_groups(Model())]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = DualOptimizer(groups)
    (warning,) = caught
    message = str(warning.message)
    assert all(field in message for field in (*foreign, "amsgrad", "layer"))
    for group in optimizer.param_groups:
        assert {field: group[field] for field in foreign} == foreign
        assert group["layer"] == 3
    with pytest.warns(UserWarning, match="change nothing in DualOptimizer: layer; they stay"):
        optimizer.add_param_group({"params": [_matrix()], "param_names": ["x"], "algorithm": "muon", "layer": 4})


def test_groups_of_a_scheduled_optimizer_need_no_warning() -> None:
    optimizer = DualOptimizer(Model())
    OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DualOptimizer([optimizer.param_groups[0]])


def test_a_tensor_of_one_element_is_a_rate() -> None:
    model = Model()
    assert {group["lr"] for group in DualOptimizer(model, lr=torch.tensor(0.5)).param_groups} == {0.5}
    rate = torch.tensor(0.25)
    groups = [{**group, "lr": rate} for group in build_parameter_groups(model)]
    assert all(group["lr"] is rate for group in DualOptimizer(groups).param_groups)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
        lambda model: model.named_parameters(),
        lambda model: model.embed.weight,
        lambda model: "model",
        lambda model: None,
        lambda model: 3,
        lambda model: [model],
        lambda model: {"params": list(model.parameters()), "algorithm": "adamw"},
        lambda model: [{"params": list(model.parameters())}],
        lambda model: [{"params": list(model.parameters()), "lr": 0.1, "weight_decay": 0.0}],
        lambda model: iter(()),
    ],
)
def test_what_is_no_model_and_no_group_gets_the_line_to_write(given: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"write DualOptimizer\((model|\[group\]), \.\.\.\)") as caught:
        DualOptimizer(given(Model()))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_of_parameters_is_refused_like_torch_does(kind: Any) -> None:
    parameters = kind([_matrix(), _matrix()])
    optimizer = DualOptimizer(Model())
    for call in (
        lambda: DualOptimizer(parameters),
        lambda: DualOptimizer([{"params": parameters, "algorithm": "muon"}]),
        lambda: optimizer.add_param_group({"params": parameters, "algorithm": "muon"}),
    ):
        with pytest.raises(TypeError, match="found a set, expected an ordered collection") as caught:
            call()
        assert "\n" not in str(caught.value)
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": None}, "preset: found None, expected a Preset or one of"),
        ({"preset": 3}, "preset: found 3, expected"),
        ({"wave_bytes": "64MB"}, "wave_bytes: found '64MB', expected a number of bytes"),
        ({"wave_bytes": True}, "wave_bytes: found True"),
        ({"wave_bytes": 1e6}, "wave_bytes: found 1000000.0"),
        ({"transport": None}, "unknown transport"),
        ({"transport": ["all_gather"]}, "unknown transport"),
        ({"owners": ["a"]}, "owners: found ['a'], expected ranks by matrix name"),
        ({"owners": {"a": "0"}}, "owners: found {'a': '0'}"),
        ({"copies": 3}, "unknown choice of copies"),
        ({"teams": 3}, "teams: found 3, expected 'never', 'auto'"),
        ({"teams": {"a": 0}}, "teams: found {'a': 0}"),
        ({"kernels": None}, "unknown choice of kernels"),
        ({"batch_invariant": "yes"}, "batch_invariant: found 'yes', expected True or False"),
        ({"master_weights": 1}, "master_weights: found 1, expected True or False"),
        ({"process_group": 0}, "process_group: found 0, expected"),
        ({"process_group": "gloo"}, "process_group: found 'gloo', expected"),
        ({"lr": torch.tensor([0.1, 0.2])}, "lr: found a tensor of shape (2,), expected a number"),
        ({"lr": None}, "lr: found None, expected float"),
        ({"lr": [0.1]}, "lr: found [0.1], expected float"),
        ({"adamw_betas": 0.9}, "adamw_betas: found 0.9, expected"),
        ({"adamw_betas": (0.9, 0.95, 0.99)}, "adamw_betas: found"),
        ({"betas": (0.9, 0.95)}, "did you mean 'adamw_betas'"),
        ({"momentum": "high"}, "momentum: found 'high', expected float"),
        ({"nesterov": "yes"}, "nesterov: found 'yes', expected bool"),
        ({"ns_steps": 2.5}, "ns_steps: found 2.5, expected int"),
        ({"schedule": 5}, "schedule: found 5"),
        ({"algorithm": 7}, "unknown algorithm '7'"),
        ({"algorithm": ["muon"]}, "unknown algorithm"),
        ({"qk_clip": "x"}, "qk_clip: found 'x'"),
        ({"rules": {}, "lr": "x"}, "lr: found 'x'"),
        ({"rules": "embedding"}, "rules: found 'embedding', expected a mapping"),
        ({"maximize": True}, "unknown field 'maximize'"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as caught:
        DualOptimizer(Model(), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": torch.tensor([0.1, 0.2])}, "lr: found a tensor of shape (2,), expected a number"),
        ({"lr": None}, "lr: found None, expected float (group of w)"),
        ({"lr": "fast"}, "lr: found 'fast', expected float"),
        ({"lr": -1.0}, "lr: found -1.0"),
        ({"weight_decay": "none"}, "weight_decay: found 'none', expected float"),
        ({"weight_decay": None}, "weight_decay: found None, expected float"),
        ({"momentum": [0.9]}, "momentum: found [0.9], expected float"),
        ({"scale": 3}, "scale: found 3"),
        ({"nesterov": 1}, "nesterov: found 1, expected bool"),
        ({"ns_steps": "five"}, "ns_steps: found 'five', expected int"),
        ({"momentun": 0.9}, "did you mean 'momentum'"),
        ({"betas": (0.9, 0.95)}, "unknown field of a group on muon 'betas'"),
        ({"maximize": True}, "maximize: found True in a group on muon, expected False"),
        ({"amsgrad": True}, "amsgrad: found True"),
        ({5: 1}, "unknown field of a group on muon '5'"),
        ({"muon_shape": "wide"}, "muon_shape: found 'wide', expected a tuple (group of w)"),
        ({"muon_shape": 4}, "muon_shape: found 4, expected a tuple"),
        ({"muon_shape": (4, 4), "muon_transposed": "no"}, "muon_transposed: found 'no', expected True or False"),
        ({"muon_shape": (2, 3)}, "w"),
        ({"param_names": "w"}, "param_names: found 'w', expected a list of strings"),
        ({"param_names": [1]}, "param_names: found [1]"),
        ({"param_names": ["w", "v"]}, "found 2 param_names for 1 params"),
        ({"params": "w"}, "params: found 'w', expected a list of parameters"),
        ({"params": [3]}, "params: found int as w, expected Tensors"),
        ({"params": None}, "params: found None"),
        ({"algorithm": 3}, "unknown algorithm '3'"),
        ({"algorithm": ["muon"]}, "unknown algorithm"),
        ({"use_muon": False}, "algorithm: found 'muon' in a group with use_muon=False"),
        ({"algorithm": None, "use_muon": "yes"}, "use_muon: found 'yes', expected True or False"),
        ({"algorithm": "vector", "segments": 5}, "segments: found 5"),
        ({"algorithm": "vector", "segments": ["ab"]}, "segments: found ['ab']"),
        ({"algorithm": "adamw", "betas": 0.9}, "betas: found 0.9"),
        ({"algorithm": "adamw", "betas": (0.9, 2.0)}, "betas: found (0.9, 2.0)"),
        ({"algorithm": "adamw", "eps": "small"}, "eps: found 'small', expected float"),
    ],
)
def test_a_wrong_field_is_one_line_that_names_it(fields: dict[Any, Any], message: str) -> None:
    optimizer = DualOptimizer(Model())
    group = {"params": [_matrix()], "param_names": ["w"], "algorithm": "muon", **fields}
    for call in (lambda: DualOptimizer([group]), lambda: optimizer.add_param_group(group)):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert len(optimizer.param_groups) == 2


def test_rules_need_a_model() -> None:
    with pytest.raises(ValueError, match=r"rules: found them beside groups, expected a model; give them to build_parameter_groups"):
        DualOptimizer(build_parameter_groups(Model()), rules={"embedding": "adamw"})
    with pytest.raises(TypeError, match=r"model: found generator, expected a torch\.nn\.Module"):
        build_parameter_groups(Model().parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight_decay: found 'x', expected"):
        build_parameter_groups(Model(), "x")  # type: ignore[arg-type]
