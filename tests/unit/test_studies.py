"""Cost, simulation, models and the plan command: numbers by hand, pictures, clear errors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from omn_dist import plan_ownership
from omn_dist.cli import main
from omn_dist.kernels import choose_kernels
from omn_dist.optim.presets import resolve_preset
from omn_dist.plan.geometry.flops import newton_schulz_flops
from omn_dist.plan.geometry.matrix import Work
from omn_dist.plan.predict.devices import DEVICES, Device, Topology
from omn_dist.plan.predict.seconds import newton_schulz_seconds
from omn_dist.plan.predict.simulation import shared_cores, simulate
from omn_dist.settings import SettingsError
from omn_dist.studies.calibration import calibrate, save_calibration, slowest_machine
from omn_dist.studies.models import MODELS, load_model
from omn_dist.studies.study import Setting, study

# Round numbers: one FLOP, one byte a second; nothing to launch, no latency.
SLOW = Topology(ranks_per_node=2, inside_bytes_per_second=2.0, between_bytes_per_second=1.0, latency_seconds=0.0)
UNIT = Device(
    name="unit",
    float32_flops_per_second=1.0,
    bfloat16_flops_per_second=4.0,
    half_rate_side=0.0,
    memory_bytes_per_second=float("inf"),
    launch_seconds=0.0,
    topology=SLOW,
)


def test_seconds_add_launches_products_and_memory() -> None:
    flops = newton_schulz_flops(4, 8, 5)
    assert newton_schulz_seconds(4, 8, Work(5), UNIT) == flops
    assert newton_schulz_seconds(4, 8, Work(5, itemsize=2), UNIT) == flops / 4
    # 5 steps of 3 kernels, and 8 around them.
    launching = Device(**{**vars(UNIT), "launch_seconds": 1.0})
    assert newton_schulz_seconds(4, 8, Work(5), launching) == flops + 23
    # A transpose a step, and 12 other views.
    viewing = Device(**{**vars(UNIT), "view_seconds": 1.0})
    assert newton_schulz_seconds(4, 8, Work(5), viewing) == flops + 17
    half = Device(**{**vars(UNIT), "half_rate_side": 4.0})
    assert newton_schulz_seconds(4, 8, Work(5), half) == 2 * flops


def test_exchange_takes_the_slower_network() -> None:
    # 4 ranks, 2 a node: one third of the bytes stays inside at 2 a second, two thirds go out at 1.
    assert SLOW.exchange_seconds(300, 4) == pytest.approx(200)
    assert SLOW.exchange_seconds(300, 2) == pytest.approx(150)
    assert SLOW.exchange_seconds(300, 1) == 0


def test_a_step_of_one_rank_is_its_products() -> None:
    plan = plan_ownership({"a": (4, 8), "b": (8, 8)}, 1)
    assert simulate(plan, UNIT).seconds == plan.flops_by_rank.sum()


def test_a_step_makes_calls_for_every_part() -> None:
    products = float(plan_ownership({"a": (8, 8)}, 1).flops_by_rank.sum())

    def seconds(world_size: int, **fields: float) -> float:
        free = Topology(**{**vars(SLOW), "inside_bytes_per_second": 1e30})
        return simulate(plan_ownership({"a": (8, 8)}, world_size), Device(**{**vars(UNIT), **fields}), free).seconds - products

    # Ten of AdamW; prepare, Newton-Schulz, apply.
    assert seconds(1, launch_seconds=1.0) == pytest.approx(10 + 5 + 23 + 2)
    # Setting up the matrix first.
    assert seconds(1, view_seconds=1.0) == pytest.approx(18 + 9 + 17 + 5)
    # The owner waits for the other's part, unpacks it, packs it and applies its own, while the
    # other rank applies its part.
    assert seconds(2, view_seconds=1.0) == pytest.approx(18 + 9 + (3 + 9) + 17 + 2 + 5)


def test_a_step_reads_and_writes_what_its_kernels_do() -> None:
    plan = plan_ownership({"a": (8, 8)}, 1)
    slow = Device(**{**vars(UNIT), "memory_bytes_per_second": 1.0})
    transform = newton_schulz_seconds(8, 8, Work(5), slow)
    # Numbers moved an element: prepare 4, apply 3, fused AdamW 7, AdamW in single operations 18.
    assert simulate(plan, slow).seconds == transform + 64 * 4 * (4 + 3)
    assert simulate(plan, slow, num_adamw_elements=100).seconds == transform + 64 * 4 * (4 + 3) + 100 * 4 * 7
    unfused = Device(**{**vars(slow), "fused_adamw": False})
    assert simulate(plan, unfused).adamw_seconds == 64 * 4 * 18


def test_ranks_that_still_work_share_the_cores_of_those_that_are_done() -> None:
    work = np.array([3.0, 1.0, 2.0, 2.0])
    assert shared_cores(work, 1.0, 4) is work
    # Two a core: after 1 s three ranks share two cores, after 3/4 s more the last has its own core.
    assert shared_cores(work, 2.0, 4).tolist() == pytest.approx([1 + 3 / 4 + 1 / 2, 1, 1 + 3 / 4, 1 + 3 / 4])
    # No rank is faster than one core, and machines share nothing.
    assert shared_cores(work, 2.0, 2).tolist() == pytest.approx([1 + 2 / 2, 1, 2, 2])
    assert shared_cores(work, 1.25, 2).tolist() == pytest.approx([1 + 2 / 1.25, 1, 2, 2])


def test_ranks_of_one_machine_are_timed_from_the_first_start_to_the_last_end() -> None:
    # Each rank of machine 7 had the core for itself: they took a second each, and two together.
    assert slowest_machine([(7, 10.0, 11.0), (7, 11.0, 12.0)]) == 2
    assert slowest_machine([(7, 10.0, 11.0), (8, 511.0, 512.5)]) == 1.5


def test_a_step_waits_for_what_it_needs() -> None:
    """Two equal waves on two ranks: the second gather and the first scatter are hidden."""
    plan = plan_ownership({f"m{index}": (8, 8) for index in range(4)}, 2, wave_bytes=300)
    assert len(plan.waves) == 2
    work = float(plan.matrices[0].flops)
    timeline = simulate(plan, UNIT)
    # In a wave each rank exchanges half of 256 bytes and a flag of 4, at 2 bytes a second.
    exchange = (128 + 4) / 2
    assert timeline.seconds == pytest.approx(exchange + 2 * work + exchange)
    assert timeline.exposed_seconds.tolist() == pytest.approx([2 * exchange] * 2)
    # If the cores carry the messages, nothing is hidden.
    busy = Device(**{**vars(UNIT), "overlaps": False})
    assert simulate(plan, busy).seconds == pytest.approx(4 * exchange + 2 * work)


def test_updates_are_applied_when_they_have_come() -> None:
    plan = plan_ownership({f"m{index}": (8, 8) for index in range(6)}, 2, wave_bytes=300)
    crawling = Topology(**{**vars(SLOW), "inside_bytes_per_second": 1e-4})
    events = simulate(plan, UNIT, crawling).events
    for wave in range(3):
        (sent,) = [event for event in events if (event.activity, event.wave) == ("scatter", wave)]
        # The own part first, then what others sent.
        _, returned = [event for event in events if (event.activity, event.wave) == ("apply", wave)]
        assert (returned.start >= sent.end).all()
        (gathered,) = [event for event in events if (event.activity, event.wave) == ("gather", wave)]
        (worked,) = [event for event in events if (event.activity, event.wave) == ("orthogonalize", wave)]
        assert (worked.start >= gathered.end).all()


def test_a_step_is_never_shorter_than_its_busiest_rank_or_longer_than_lockstep() -> None:
    shapes = {f"m{index}": (8 + 8 * (index % 3), 24) for index in range(23)}
    for world_size in (2, 3, 5):
        plan = plan_ownership(shapes, world_size, wave_bytes=4000)
        free = Device(**{**vars(UNIT), "topology": Topology(**{**vars(SLOW), "inside_bytes_per_second": 1e30,
                                                                "between_bytes_per_second": 1e30})})  # fmt: skip
        seconds = simulate(plan, free).seconds
        assert plan.flops_by_rank.max() <= seconds * (1 + 1e-12)
        assert seconds <= plan.wave_imbalance * plan.flops_by_rank.mean() * (1 + 1e-12)


# Billions of parameters as published (DeepSeek-V3 without its prediction layer).
PUBLISHED = {
    "omn1": 1.503200256,
    "qwen3-1.7b": 1.72,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.8,
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "qwen3-30b-a3b": 30.5,
    "deepseek-v3": 671,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_their_published_size(name: str) -> None:
    model = load_model(name)
    assert model.num_elements / 1e9 == pytest.approx(PUBLISHED[name], rel=2e-3)
    assert model.source
    if name == "omn1":
        assert model.num_elements == 1_503_200_256
        assert model.num_other_elements == 262_734_848


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("qwen3-30b-a3b", "deepseek-v3")])
def test_every_dense_model_is_within_a_percent_of_its_bound(name: str) -> None:
    model = load_model(name)
    world_size = 2
    while world_size <= len(model.matrices) // 4:
        plan = plan_ownership(model.matrices, world_size)
        assert plan.gap <= 0.01, (name, world_size)
        world_size *= 2


def test_experts_are_within_a_percent_of_their_bound() -> None:
    matrices = load_model("qwen3-30b-a3b").matrices
    for world_size in (64, 1024):
        assert plan_ownership(matrices, world_size).gap <= 0.01, world_size


def test_meshes_share_the_work_of_all_ranks() -> None:
    model = load_model("omn1")
    device = DEVICES["h100"]
    plain, hsdp, tensor = (
        study([model], [8], ["flops"], Setting(device=device, topology=device.topology, replicas=replicas, tensor=parallel))[0].plan
        for replicas, parallel in ((1, 1), (2, 1), (1, 2))
    )
    assert plain.imbalance == hsdp.imbalance == tensor.imbalance
    # Updates go back to both copies.
    assert hsdp.bytes_sent_by_rank.sum() > 1.3 * plain.bytes_sent_by_rank.sum()
    assert tensor.bytes_sent_by_rank.sum() == pytest.approx(plain.bytes_sent_by_rank.sum(), rel=0.01)
    with pytest.raises(SettingsError, match="ranks: found 8, expected a multiple of 3"):
        study([model], [8], ["flops"], Setting(device=device, topology=device.topology, replicas=3))


def test_a_study_is_of_an_algorithm_for_matrices() -> None:
    for algorithm, message in (("adamw", "found 'adamw', expected one that updates matrices"), ("mun", "did you mean 'muon'")):
        with pytest.raises(SettingsError, match=message):
            resolve_preset("omn", {"algorithm": algorithm})


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "omn1", "--ranks", "8,64,256", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["ranks"] for row in rows] == [8, 64, 256]
    for row in rows:
        assert row["model"] == "omn1"
        assert row["strategy"] == "flops"
        assert row["imbalance"] >= row["bound"] >= 1
        assert min(row["bytes_sent_per_rank"], row["temporary_bytes"], row["step_ms"]) > 0
    assert rows[0]["imbalance"] <= 1.003
    assert rows[1]["imbalance"] == rows[1]["bound"] == pytest.approx(1.14707, abs=1e-5)
    # Plans without teams report what teams would do.
    assert [(row["teams"]["executed"], row["teams"]["pays"]) for row in rows[1:]] == [(False, False), (False, True)]
    assert rows[2]["teams"]["imbalance"] <= 1.25 < rows[2]["imbalance"]
    assert rows[2]["step_ms"] == rows[2]["teams"]["step_ms_whole"] > rows[2]["teams"]["step_ms"]
    assert main(["plan", "--model", "omn1", "--ranks", "64,256", "--teams", "auto", "--json"]) == 0
    few, many = json.loads(capsys.readouterr().out)
    assert few == rows[1]
    assert many["teams"] == {**rows[2]["teams"], "executed": True}
    for key in ("imbalance", "wave_imbalance", "bytes_sent_per_rank", "temporary_bytes", "step_ms"):
        assert many[key] == many["teams"][key], key
    assert many["matrices"] == 196


def test_plan_writes_tables_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps([[64, 64]] * 6 + [[64, 256]] * 3))
    arguments = ["--ranks", "2,4", "--strategy", "flops,layer-wise", "--csv", f"{tmp_path}/rows.csv", "--plot", f"{tmp_path}/plots"]
    assert main(["plan", "--model", str(shapes), *arguments, "--html", f"{tmp_path}/page.html"]) == 0
    output = capsys.readouterr().out
    assert "# shapes: 9 matrices, 73,728 parameters" in output
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 5
    pictures = {path.name for path in (tmp_path / "plots").iterdir()}
    assert pictures == {
        "imbalance.png",
        "memory.png",
        "step.png",
        "load-shapes.png",
        "timeline-shapes.png",
        "shares-shapes.png",
    }
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/png;base64,") == len(pictures)
    assert "http" not in page.replace("http-equiv", "")


def test_hugging_face_configs(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    fields = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    model = load_model(str(folder / "config.json"))
    assert model.name == "my-llama"
    assert model.matrices["layers.1.self_attn.k_proj.weight"] == (32, 64)
    assert model.matrices["layers.0.mlp.down_proj.weight"] == (64, 160)
    assert len(model.matrices) == 14
    assert model.num_other_elements == 1000 * 64 + 5 * 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "plan: found no model"),
        (["--model", "qwen3-8"], "unknown model 'qwen3-8'; did you mean 'qwen3-8b'"),
        (["--model", "omn1", "--strategy", "flop"], "unknown strategy 'flop'; did you mean 'flops'"),
        (["--model", "omn1", "--device", "h10"], "unknown device profile 'h10'; did you mean 'h100'"),
        (["--model", "omn1", "--ranks", "0"], "--ranks: found '0'"),
        (["--model", "omn1", "--replicas", "3"], "ranks: found 2, expected a multiple of 3"),
        (["--model", "/nowhere/config.json"], "/nowhere/config.json: No such file"),
        (["--model", "omn1", "--device", "/nowhere/node.json"], "/nowhere/node.json: no calibration"),
        (["--model", "omn1", "--wave-mib", "0"], "--wave-mib: found 0"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_calibration_can_be_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = calibrate(torch.device("cpu"), repeats=1)
    assert 1e8 < device.float32_flops_per_second < 1e14
    assert 1e7 < device.memory_bytes_per_second < 1e13
    assert 1e-8 < device.launch_seconds < 1e-2
    assert 1e-8 < device.view_seconds < 1e-2
    assert not device.overlaps
    assert device.fused_adamw == choose_kernels().fuses_adamw
    save_calibration(device, tmp_path / "node.json")
    assert main(["plan", "--model", "omn1", "--ranks", "2", "--json", "--device", str(tmp_path / "node.json")]) == 0
    assert json.loads(capsys.readouterr().out)[0]["step_ms"] > 0
    (tmp_path / "node.json").write_text('{"nam": 1}')
    assert main(["plan", "--model", "omn1", "--device", str(tmp_path / "node.json")]) == 2
    assert "node.json: unknown key 'nam'" in capsys.readouterr().err
