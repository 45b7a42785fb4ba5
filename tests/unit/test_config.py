import sys
from pathlib import Path

import pytest
import yaml

from omn_dist.settings import SettingsError
from omn_dist.train.config import check_for_world_size, load_config, to_mapping

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text((CONFIGS / "omn_tiny.yaml").read_text())
    return path


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_load(path: Path) -> None:
    config = load_config(path)
    assert config.last_step >= 1


def test_omn_1_recipe() -> None:
    config = load_config(CONFIGS / "omn1_193b.yaml")
    assert config.schedule.warmup_tokens == 2_000_000_000
    assert config.schedule.stable_until_tokens == 164_000_000_000
    assert config.schedule.total_tokens == 193_000_000_000
    assert config.schedule.floor == 1e-5
    assert (config.optimizer.preset, config.optimizer.weight_decay) == ("omn", 0.01)
    assert config.clipping.adamw_max_norm == 1.0
    assert (config.precision.autocast, config.precision.deterministic) == ("bfloat16", False)


def test_overrides_are_yaml_values(tiny: Path) -> None:
    config = load_config(
        tiny,
        [
            "batch.global_batch=64",
            "optimizer.overrides.lr=2e-2",
            "clipping.adamw_max_norm=null",
            "precision.deterministic=true",
            "run_folder=somewhere=else",
        ],
    )
    assert config.batch.global_batch == 64
    assert float(config.optimizer.overrides["lr"]) == 0.02
    assert config.clipping.adamw_max_norm is None
    assert config.precision.deterministic is True
    assert config.run_folder == "somewhere=else"


def test_explicit_zeros_are_kept(tiny: Path) -> None:
    config = load_config(tiny, ["optimizer.overrides.lr=0.0", "optimizer.weight_decay=0.0", "schedule.floor=0.0", "seed=0"])
    assert (config.optimizer.overrides["lr"], config.optimizer.weight_decay, config.schedule.floor) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.total_token=1", "did you mean 'schedule.total_tokens'"),
        ("bath.global_batch=1", "did you mean 'batch'"),
        ("optimizer.preset=omm", "did you mean 'omn'"),
        ("optimizer.overrides.adam_lr=1", "did you mean 'adamw_lr'"),
        ("optimizer.overrides.form=standart", "did you mean 'standard'"),
        ("optimizer.transport=all_to_al", "did you mean 'all_to_all'"),
        ("optimizer.teams=aut", "did you mean 'auto'"),
        ("optimizer.kernels=torhc", "did you mean 'torch'"),
        ("optimizer.batch_invariant=1", "optimizer.batch_invariant: found 1, expected bool"),
        ("optimizer.rule_modules=my_rules", "optimizer.rule_modules: found 'my_rules', expected tuple"),
        (
            "optimizer.rule_modules=[no_such_module]",
            "optimizer.rule_modules: cannot import 'no_such_module' (ModuleNotFoundError: No module named 'no_such_module')",
        ),
        ("batch.global_batch=many", "batch.global_batch: found 'many', expected int"),
        ("batch.micro_batch=0", "batch.micro_batch: found 0"),
        ("checkpoint.keep=0", "checkpoint.keep: found 0"),
        ("clipping.adamw_max_norm=-1", "clipping.adamw_max_norm: found -1"),
        ("seed=-1", "seed: found -1"),
        ("seed", "expected key=value"),
        ("seed.x=1", "seed is a value, not a section"),
        ("seed=[1", "not valid YAML"),
        ("model.head_dim=3", "model.head_dim: found 3"),
    ],
)
def test_bad_overrides(tiny: Path, override: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_config(tiny, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "expected a mapping"),
        ("", "expected a mapping"),
        ("model: {\n", "not valid YAML"),
        ("seed: 1\nseed: 2\n", "line 2 column 1: not valid YAML: key 'seed' is given twice"),
        ("run_folder: x\n", "model: missing"),
        ("a: !!python/object:os.system {}\n", "not valid YAML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_config(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.yaml: cannot read the configuration: No such file"):
        load_config(tmp_path / "absent.yaml")


def test_window_must_divide_by_the_ranks(tiny: Path) -> None:
    config = load_config(tiny, ["batch.global_batch=16", "batch.micro_batch=4"])
    for world_size, sequences in ((1, 4), (2, 4), (4, 4), (8, 2), (16, 1)):
        check_for_world_size(config, world_size)
        assert config.batch.sequences_per_pass(world_size) == sequences
    with pytest.raises(SettingsError, match="found 16 on 3 ranks, expected a multiple of the ranks"):
        check_for_world_size(config, 3)
    with pytest.raises(SettingsError, match=r"found 3 for 8 sequences a rank .* expected a divisor of 8"):
        check_for_world_size(load_config(tiny, ["batch.global_batch=16", "batch.micro_batch=3"]), 2)


def test_mapping_survives_a_round_trip(tiny: Path, tmp_path: Path) -> None:
    config = load_config(tiny)
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(to_mapping(config)))
    assert load_config(again) == config


def test_steps(tiny: Path) -> None:
    config = load_config(tiny, ["schedule.stable_until_tokens=null", "schedule.warmup_tokens=0"])
    assert config.tokens_per_window == config.batch.global_batch * config.data.sequence_length
    window = config.tokens_per_window
    base = ["schedule.stable_until_tokens=null", "schedule.warmup_tokens=0"]
    assert load_config(tiny, [*base, f"schedule.total_tokens={3 * window}"]).last_step == 3
    assert load_config(tiny, [*base, f"schedule.total_tokens={3 * window + 1}"]).last_step == 4
    assert load_config(tiny, [*base, f"schedule.total_tokens={3 * window}", "stop_after_steps=2"]).last_step == 2


def test_rule_modules_are_imported_once_and_before_the_preset_is_checked(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module registers a preset; it would register a rule in the same way."""
    (tmp_path / "registers_a_preset.py").write_text(
        "import dataclasses\n"
        "from omn_dist.optim import presets\n"
        "assert 'mine' not in presets.PRESETS\n"
        "mine = dataclasses.replace(presets.PRESETS['omn'], name='mine')\n"
        "presets.PRESETS = {**presets.PRESETS, 'mine': mine}\n"
    )
    monkeypatch.chdir(tmp_path)
    from omn_dist.optim import presets

    monkeypatch.setattr(presets, "PRESETS", presets.PRESETS)
    with pytest.raises(SettingsError, match="unknown preset 'mine'"):
        load_config(tiny, ["optimizer.preset=mine"])
    for _ in range(2):
        config = load_config(tiny, ["optimizer.preset=mine", "optimizer.rule_modules=[registers_a_preset]"])
    assert config.optimizer.rule_modules == ("registers_a_preset",)
    assert "" not in sys.path


def test_a_rule_module_that_fails_is_one_line(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_on_import.py").write_text("raise ValueError('first line\\nsecond line')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as caught:
        load_config(tiny, ["optimizer.rule_modules=[fails_on_import]"])
    assert "optimizer.rule_modules: cannot import 'fails_on_import' (ValueError: first line)" in str(caught.value)
    assert "\n" not in str(caught.value)
