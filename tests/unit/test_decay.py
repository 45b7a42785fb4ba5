"""Whose weight decay and learning rate a parameter gets: the group's, else the keyword's, else the preset's."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from omn_dist import PRESETS, DualOptimizer, build_parameter_groups
from omn_dist.cli import main
from omn_dist.models.omn import OMN
from omn_dist.roles import format_groups
from omn_dist.train.config import RunConfig, load_config
from omn_dist.train.metrics import read_rows
from omn_dist.train.norms import view_groups
from omn_dist.train.preflight import compare_configs
from omn_dist.train.setup import build_groups

MICRO = Path(__file__).parents[1] / "micro.yaml"


class Model(nn.Module):
    """One parameter of every kind of decay: a matrix, one with rows on AdamW, a router, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.router, self.norm = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False), nn.LayerNorm(8)
        self.gated = nn.Linear(8, 12, bias=False)
        self.gated.muon_views = {
            "weight": {"shape": (12, 8), "split_sizes": (8, 4), "split_names": ("q", "g"), "split_algorithms": ("muon", "adamw")}
        }


def _decays(groups: Any) -> dict[str, float]:
    """The decay of each kind of parameter, as the groups of an optimizer say it."""
    found = {name: group["weight_decay"] for group in groups for name in group["param_names"]}
    rows = next(group["adamw_weight_decay"] for group in groups if "gated.weight" in group["param_names"])
    return {
        "matrix": found["proj.weight"],
        "gated": found["gated.weight"],
        "rows": rows,
        "router": found["router.weight"],
        "norm": found["norm.weight"],
    }


def _expected(matrices: float, others: float) -> dict[str, float]:
    return {"matrix": matrices, "gated": matrices, "rows": others, "router": others, "norm": 0.0}


@pytest.mark.parametrize(
    ("given", "options", "matrices", "others"),
    [
        (None, {}, 0.1, 0.1),
        (None, {"preset": "omn"}, 0.0, 0.0),
        (None, {"preset": "torch"}, 0.1, 0.01),
        (None, {"preset": "moonlight", "weight_decay": 0.3}, 0.3, 0.3),
        (None, {"preset": "moonlight", "weight_decay": 0.3, "adamw_weight_decay": 0.4}, 0.3, 0.4),
        (None, {"preset": "moonlight", "adamw_weight_decay": 0.0}, 0.1, 0.0),
        (None, {"preset": "torch", "weight_decay": 0.0}, 0.0, 0.01),
        (0.0, {"preset": "moonlight", "weight_decay": 0.3}, 0.0, 0.0),
        (0.2, {"preset": "moonlight", "weight_decay": 0.3, "adamw_weight_decay": 0.4}, 0.2, 0.2),
    ],
)
def test_a_group_beats_a_keyword_and_a_keyword_beats_the_preset(
    given: float | None, options: dict[str, Any], matrices: float, others: float
) -> None:
    optimizer = DualOptimizer(build_parameter_groups(Model(), given), **options)
    assert _decays(optimizer.param_groups) == _expected(matrices, others)
    if given is None:
        assert _decays(DualOptimizer(Model(), **options).param_groups) == _expected(matrices, others)


@pytest.mark.parametrize(
    ("overrides", "matrices", "others"),
    [
        (["optimizer.preset=moonlight", "optimizer.weight_decay=null"], 0.1, 0.1),
        (["optimizer.preset=moonlight", "optimizer.weight_decay=0.0"], 0.1, 0.0),
        (["optimizer.preset=moonlight"], 0.1, 0.01),
        (["optimizer.preset=moonlight", "optimizer.weight_decay=null", "optimizer.overrides.weight_decay=0.3"], 0.3, 0.3),
        (["optimizer.preset=torch", "optimizer.weight_decay=null", "optimizer.overrides.adamw_weight_decay=0.4"], 0.1, 0.4),
        (["optimizer.weight_decay=0.3", "optimizer.overrides.adamw_weight_decay=0.4"], 0.0, 0.3),
        (["optimizer.weight_decay=null"], 0.0, 0.0),
        ([], 0.0, 0.01),
    ],
)
def test_yaml_follows_the_same_order(overrides: list[str], matrices: float, others: float) -> None:
    config = load_config(MICRO, overrides)
    groups = build_groups(config, Model())
    assert _decays(groups) == _expected(matrices, others)
    optimizer = DualOptimizer(groups, preset=config.optimizer.preset, **config.optimizer.fields())
    assert _decays(optimizer.param_groups) == _expected(matrices, others)


def test_presets_with_one_rate_have_one_rate() -> None:
    for name in ("moonlight", "qwen", "muonclip"):
        assert (PRESETS[name].adamw_lr, PRESETS[name].adamw_weight_decay) == (None, None)
        optimizer = DualOptimizer(Model(), preset=name, lr=1e-3)
        assert {group["lr"] for group in optimizer.param_groups} == {1e-3}
        assert {group["adamw_lr"] for group in optimizer.param_groups if "adamw_lr" in group} == {1e-3}
        apart = DualOptimizer(Model(), preset=name, adamw_lr=2e-3)
        assert {(group["algorithm"], group["lr"]) for group in apart.param_groups} == {
            ("muon", PRESETS[name].lr),
            ("adamw", 2e-3),
        }
    assert {group["lr"] for group in DualOptimizer(Model(), preset="omn", lr=1e-3).param_groups} == {1e-3, 3e-4}


def test_the_table_of_groups_shows_what_is_in_effect() -> None:
    groups = build_parameter_groups(Model(), rules={"norm": {"lr": 0.5}})
    lines = [line.split() for line in format_groups(groups).splitlines()]
    assert [line[:3] for line in lines[1:-1]] == [
        ["Muon", "-", "-"],
        ["Muon", "-", "-"],
        ["AdamW", "-", "-"],
        ["AdamW", "-", "-"],
        ["AdamW", "0", "0.5"],
    ]
    optimizer = DualOptimizer(groups, preset="torch", lr=0.02, weight_decay=0.3)
    lines = [line.split() for line in format_groups(optimizer.param_groups).splitlines()]
    assert [line[:3] for line in lines[1:-1]] == [
        ["Muon", "0.3", "0.02"],
        ["Muon", "0.3", "0.02"],
        ["AdamW", "0.01", "0.001"],
        ["AdamW", "0.01", "0.001"],
        ["AdamW", "0", "0.5"],
    ]


def test_routes_prints_what_the_optimizer_of_the_run_has(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "optimizer.preset=moonlight",
        "optimizer.weight_decay=0.05",
        "optimizer.overrides={lr: 0.002, weight_decay: 0.3}",
        'optimizer.rules={"*.o_proj.weight": adamw, embedding: {lr: 0.25}}',
    ]
    assert main(["routes", str(MICRO), *overrides]) == 0
    output = capsys.readouterr().out
    rows = [line.split()[:4] for line in output.splitlines()]
    for row in (["Muon", "0.3", "0.002", "12"], ["AdamW", "0.05", "0.002", "2"], ["AdamW", "0", "0.25", "1"]):
        assert row in rows, output
    assert re.search(r"weight decay in effect: 0 on \d+ tensors, 0.05 on 2 tensors, 0.3 on 12 tensors", output)

    config: RunConfig = load_config(MICRO, overrides)
    optimizer = DualOptimizer(build_groups(config, OMN(config.model)), preset="moonlight", **config.optimizer.fields())  # type: ignore[arg-type]
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.002, 0.3),
        (0.002, 0.05),
        (0.002, 0.0),
        (0.25, 0.0),
    ]
    labels = [view.label for view in view_groups(optimizer.param_groups)]
    assert len(set(labels)) == len(labels) == 4


def test_a_run_trains_groups_at_their_own_rates(tmp_path: Path) -> None:
    rules = "optimizer.rules={embedding: {lr: 0.25}, layers.0.*norm.weight: {lr: 0.5}}"
    assert main(["train", str(MICRO), f"run_folder={tmp_path}/run", rules, "stop_after_steps=20"]) == 0
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert list(rows[0]["learning_rates"].values()) == [0.02, 0.01, 0.25, 0.5]
    # The cool-down ends at the floor, for every group.
    assert set(rows[-1]["learning_rates"].values()) == {1e-5}
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    peaks = [group["peak_learning_rate"] for group in record["optimizer"]["effective"].values()]
    assert peaks == [0.02, 0.01, 0.25, 0.5]


def test_a_run_from_before_continues_where_decay_was_a_default() -> None:
    """What differs in effect is refused by parameter, when the optimizer is loaded."""
    before, now = {"optimizer": {"weight_decay": 0.0}}, {"optimizer": {"weight_decay": None, "rules": {}}}
    assert compare_configs(before, now) == ("optimizer.weight_decay 0.0 -> None",)


def test_a_rule_of_yaml_that_cannot_be_applied_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for rules, message in (
        ("{embeding: {lr: 0.3}}", "did you mean 'embedding'"),
        ("{embedding: {lrr: 0.3}}", "did you mean 'lr'"),
        ("{embedding: {lr: fast}}", "lr: found 'fast', expected float"),
        ("{embedding: 3}", "expected an algorithm's name or a mapping"),
    ):
        for command in (["routes", str(MICRO)], ["train", str(MICRO), "--check", "run_folder=/tmp/no_such_run"]):
            assert main([*command, f"optimizer.rules={rules}"]) == 2
            lines = capsys.readouterr().err.splitlines()
            assert len(lines) == 1, lines
            assert message in lines[0]
