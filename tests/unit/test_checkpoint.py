"""State by name, checks, and checkpoint folders. tests/distributed/test_training.py has ranks."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from omn_dist import DualOptimizer
from omn_dist.models import OMN
from omn_dist.optim.checkpoint import (
    check_groups,
    check_tensors,
    describe_groups,
    model_state_by_name,
    optimizer_state_by_name,
)
from omn_dist.settings import SettingsError
from omn_dist.train.checkpointing import complete_checkpoints, read_saved_run
from omn_dist.train.config import load_config
from omn_dist.train.setup import build_groups

CONFIG = load_config(Path(__file__).parents[1] / "micro.yaml")


@pytest.fixture
def model() -> OMN:
    model = OMN(CONFIG.model)
    model.initialize_weights(0)
    return model


@pytest.fixture
def optimizer(model: OMN) -> DualOptimizer:
    return DualOptimizer(build_groups(CONFIG, model), preset="omn")


def _metadata(tensors: dict[str, torch.Tensor]) -> Metadata:
    return Metadata(
        {name: TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), []) for name, tensor in tensors.items()}
    )


def test_model_state_has_each_tensor_once(model: OMN) -> None:
    state = model_state_by_name(model)
    assert "embed_tokens.weight" in state
    assert "lm_head.weight" not in state
    assert set(state) == {name for name, _ in model.named_parameters()}
    assert state["norm.weight"].data_ptr() == model.norm.weight.data_ptr()


def test_reading_the_state_takes_no_step(model: OMN, optimizer: DualOptimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    state = optimizer_state_by_name(optimizer)
    copies = {name: {key: value.clone() for key, value in values.items()} for name, values in state.items()}
    again = optimizer_state_by_name(optimizer)
    assert set(state) == {name for name, _ in model.named_parameters()}
    assert set(state["norm.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(state["layers.0.attention.q_proj.weight"]) == {"momentum_buffer"}
    for name, values in again.items():
        for key, value in values.items():
            torch.testing.assert_close(value, copies[name][key], rtol=0, atol=0)
    for old, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), old, rtol=0, atol=0)


def test_state_tensors_are_live(optimizer: DualOptimizer, model: OMN) -> None:
    optimizer_state_by_name(optimizer)["norm.weight"]["exp_avg"].fill_(3.0)
    assert optimizer.state[model.norm.weight]["exp_avg"].unique().item() == 3.0


def test_an_optimizer_without_state_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    lazy = torch.optim.SGD([{"params": [parameter], "param_names": ["w"]}], lr=1.0, momentum=0.9)
    with pytest.raises(SettingsError, match="'w' has no state"):
        optimizer_state_by_name(lazy)


def test_grouping_differences_name_parameter_and_field(optimizer: DualOptimizer) -> None:
    saved = describe_groups(optimizer)
    check_groups(saved, optimizer)
    name = "layers.0.attention.q_proj.weight"
    for field, value in (("algorithm", "adamw"), ("weight_decay", 0.5)):
        changed = {**saved, name: {**saved[name], field: value}}
        with pytest.raises(SettingsError, match=rf"{field} of parameter '{name}' is {value!r} in the checkpoint"):
            check_groups(changed, optimizer)
    fewer = {key: value for key, value in saved.items() if key != name}
    with pytest.raises(SettingsError, match=f"'{name}' of this run is not in the checkpoint"):
        check_groups(fewer, optimizer)
    with pytest.raises(SettingsError, match="'extra' is in the checkpoint but in no group"):
        check_groups({**saved, "extra": saved[name]}, optimizer)


def test_tensors_that_would_be_cast_cut_or_missing_are_refused() -> None:
    template = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    check_tensors(_metadata(template), template)
    with pytest.raises(SettingsError, match=r"dtype of 'a' is torch\.bfloat16, expected torch\.float32"):
        check_tensors(_metadata(template | {"a": torch.zeros(2, 3, dtype=torch.bfloat16)}), template)
    with pytest.raises(SettingsError, match=r"shape of 'b' is \(5,\), expected \(4,\)"):
        check_tensors(_metadata(template | {"b": torch.zeros(5)}), template)
    with pytest.raises(SettingsError, match="tensor 'b' is missing"):
        check_tensors(_metadata({"a": template["a"]}), template)


def test_unfinished_folders_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("step_00000002", "step_00000010", "step_00000011.partial", "step_x", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000099").write_text("a file")
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_00000002", "step_00000010"]
    assert complete_checkpoints(tmp_path / "absent") == []


@pytest.mark.parametrize(
    "manifest", ["", "[]", "{}", '{"format": 2, "size_by_file": {}}', '{"format": 1, "size_by_file": {"x": 1}}']
)
def test_odd_manifests_are_one_line(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(SettingsError) as caught:
        read_saved_run(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
