"""Rules that a program registers: from a file of their own, with everything that the package's rules get."""

import importlib.util
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import is_shard_of, set_gradient, sharded, whole, whole_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import omn_dist
from omn_dist import DualOptimizer, build_parameter_groups, plan_ownership
from omn_dist.optim.presets import resolve_preset
from omn_dist.optim.rules.rule import MatrixRule, ShardRule
from omn_dist.settings import SettingsError
from omn_dist.train.config import load_config

ROOT = Path(__file__).parents[2]
NUM_STEPS = 3
SHAPES = ((20, 10), (10, 20), (6, 20), (3, 8), (1, 16), (16, 2))


def _module(name: str, source: str) -> ModuleType:
    """A module from its text, as if it stood in a file of the user's."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    return module


def register_copy_of_normuon() -> None:
    """A second NorMuon: the text of its file with another name, and nothing else."""
    source = (ROOT / "omn_dist/optim/rules/normuon.py").read_text(encoding="utf-8")
    copy, count = re.subn(r'name = "normuon"', 'name = "my_normuon"', source)
    assert count == 1
    omn_dist.register_rule(_module("copy_of_normuon", copy).NorMuon())


def register_example() -> None:
    spec = importlib.util.spec_from_file_location("spectral_descent", ROOT / "examples/spectral_descent.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["spectral_descent"] = module
    spec.loader.exec_module(module)


def _trained(algorithm: str, options: dict[str, Any], split: int = 0, *, reload: bool = False) -> list[Tensor]:
    """Whole weights and state after some steps, with gradients missing in one of them."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    mesh = init_device_mesh("cpu", (num_ranks,)) if dist.is_initialized() else None
    placements = [Shard(split)]
    stack = whole_tensors(((5, 4, 6),), 7)[0]
    parameters = [sharded(tensor, mesh, placements) for tensor in whole_tensors(SHAPES, 0)]
    experts = sharded(stack, mesh, [Shard(0)])
    groups = [
        {"params": parameters, "algorithm": algorithm, "weight_decay": 0.1},
        {"params": [experts], "algorithm": algorithm, "muon_shape": (5, 4, 6), "lr": 0.01},
    ]
    optimizer = DualOptimizer(groups, preset="normuon", wave_bytes=2000, **options)
    shapes = [*SHAPES, (5, 4, 6)]
    for step in range(NUM_STEPS):
        for number, (parameter, gradient) in enumerate(zip([*parameters, experts], whole_tensors(shapes, 10 + step), strict=True)):
            set_gradient(parameter, gradient)
            if step == 1 and number == 2:
                # On all ranks but the first zeros, which a missing gradient counts as.
                parameter.grad = parameter.grad * 0 if num_ranks == 1 or dist.get_rank() else None
        optimizer.step()
        if reload:
            optimizer.load_state_dict(optimizer.state_dict())
    found = []
    for parameter in (*parameters, experts):
        found += [whole(parameter), *(whole(optimizer.state[parameter][key]) for key in sorted(optimizer.state[parameter]))]
    return found


def _same(found: list[Tensor], expected: list[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"tensor {index} of shape {tuple(one.shape)} differs by {(one - other).abs().max()}"


def _copy_has_the_bits_of_normuon(split: int) -> None:
    register_copy_of_normuon()
    options = {"row_beta": 0.9, "cautious_decay": True}
    expected = _trained("normuon", options, split)
    _same(_trained("my_normuon", options, split), expected)
    _same(_trained("muon", options | {"algorithm": "my_normuon"}, split), expected)
    _same(_trained("my_normuon", options, split, reload=True), expected)


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "split"), [(1, 0), (2, 0), (3, 0), (2, 1)])
def test_a_copy_of_normuon_from_outside_has_its_bits(world_size: int, split: int) -> None:
    run_ranks(world_size, _copy_has_the_bits_of_normuon, split)


def _spectral(options: dict[str, Any]) -> list[Tensor]:
    register_example()
    return _trained("muon", options | {"algorithm": "spectral"})


@pytest.mark.distributed
def test_the_example_has_the_bits_of_one_process() -> None:
    torch.set_num_threads(1)
    expected = _spectral({"gain": 0.5})
    assert not torch.equal(expected[0], whole_tensors(SHAPES, 0)[0])
    for world_size in (1, 2, 3):
        for found in run_ranks(world_size, _spectral, {"gain": 0.5}):
            _same(found, expected)


def test_the_example_does_what_it_says() -> None:
    register_example()
    (weight,) = whole_tensors(((12, 8),), 0)
    parameter = nn.Parameter(weight.clone())
    options = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "momentum_rule": "sum", "nesterov": False, "gain": 2.0}
    optimizer = DualOptimizer(
        [{"params": [parameter], "algorithm": "spectral"}], algorithm="spectral", **{"preset": "omn", **options}
    )
    (gradient,) = whole_tensors(((12, 8),), 1)
    parameter.grad = gradient.clone()
    optimizer.step()
    expected = weight.double() - 0.2 * gradient.double() / torch.linalg.matrix_norm(gradient.double(), ord=2)
    # The norm is a lower bound by power iteration, 0.1 % below it at most on such a matrix.
    torch.testing.assert_close(parameter.double(), expected, rtol=0, atol=2e-4)


class _HalfSGD(ShardRule):
    """Plain gradient descent that keeps a count, to try everything that a shard rule can say."""

    name = "half_sgd"
    label = "SGD"

    def defaults(self, recipe: Any) -> dict[str, Any]:
        return {"lr": recipe["adamw_lr"], "weight_decay": 0.0}

    def state(self, group: Any) -> Any:
        from omn_dist.optim.rules.rule import StateTensor

        return (StateTensor("count", "once"), StateTensor("last", "elements"))

    def settings(self, group: Any) -> float:
        return float(group["lr"])

    def update(self, shards: Any, settings: float, tools: Any) -> None:
        for shard in shards:
            shard.parameter.add_(shard.gradient, alpha=-0.5 * settings)
            shard.state["last"].copy_(shard.gradient)
            shard.state["count"].add_(1)


def _shard_rule() -> None:
    omn_dist.register_rule(_HalfSGD())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights, gradients = whole_tensors(((9,), (5, 4)), 0), whole_tensors(((9,), (5, 4)), 1)
    parameters = [sharded(weight, mesh) for weight in weights]
    optimizer = DualOptimizer([{"params": parameters, "algorithm": "half_sgd", "lr": 0.25}], preset="omn")
    for parameter, gradient in zip(parameters, gradients, strict=True):
        set_gradient(parameter, gradient)
    optimizer.step()
    assert optimizer.num_collectives == 0
    for parameter, weight, gradient in zip(parameters, weights, gradients, strict=True):
        assert is_shard_of(parameter.detach(), weight - 0.125 * gradient)
        assert is_shard_of(optimizer.state[parameter]["last"], gradient)
        assert optimizer.state[parameter]["count"] == 1


@pytest.mark.distributed
def test_a_rule_on_shards() -> None:
    run_ranks(2, _shard_rule)


def test_groups_of_a_model_can_name_it() -> None:
    register_copy_of_normuon()
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6))
    groups = build_parameter_groups(model, rules={"0.weight": "my_normuon"})
    assert {group["algorithm"]: group["param_names"] for group in groups if "bias" not in group["param_names"][0]} == {
        "muon": ["1.weight"],
        "my_normuon": ["0.weight"],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = DualOptimizer(groups, preset="omn")
    assert set(optimizer.state[model[0].weight]) == {"momentum_buffer", "row_second_moment"}
    assert optimizer.state[model[1].weight].keys() == {"momentum_buffer"}


def test_plans_count_its_numbers() -> None:
    register_copy_of_normuon()
    shapes = {"a": (12, 8)}
    ours, theirs = (plan_ownership(shapes, 3, algorithm=name) for name in ("my_normuon", "normuon"))
    assert ours.bytes_sent_by_rank.tolist() == theirs.bytes_sent_by_rank.tolist()


def test_yaml_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delitem(sys.modules, "spectral_descent", raising=False)
    overrides = ["optimizer.rule_modules=[spectral_descent]", "optimizer.overrides={algorithm: spectral, gain: 0.5}"]
    config = load_config(str(ROOT / "configs/omn_tiny.yaml"), [*overrides, f"run_folder={tmp_path}"])
    preset = resolve_preset(config.optimizer.preset, config.optimizer.overrides)
    assert preset.algorithm == "spectral"
    assert dict(preset.own) == {"gain": 0.5}
    with pytest.raises(SettingsError, match=r"gain: found -1, expected a number >= 0"):
        resolve_preset("omn", {"algorithm": "spectral", "gain": -1})
    with pytest.raises(SettingsError, match="did you mean 'gain'"):
        DualOptimizer([{"params": [nn.Parameter(torch.zeros(2, 2))], "algorithm": "spectral", "gian": 1.0}], preset="omn")


def test_what_is_no_rule_is_refused() -> None:
    class Nameless(MatrixRule):
        pass

    with pytest.raises(TypeError, match="expected an instance of a subclass of MatrixRule or ShardRule"):
        omn_dist.register_rule(_HalfSGD)  # type: ignore[arg-type]

    class Taken(_HalfSGD):
        name = "adamw"

    with pytest.raises(SettingsError, match="'adamw', which is a rule of omn_dist"):
        omn_dist.register_rule(Taken())

    class Unnamed(_HalfSGD):
        name = ""

    with pytest.raises(SettingsError, match="expected a string that is not empty"):
        omn_dist.register_rule(Unnamed())
    with pytest.raises(TypeError, match="abstract"):
        Nameless()  # type: ignore[abstract]
