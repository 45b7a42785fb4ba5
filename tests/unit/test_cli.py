"""The command line in this process: one rank, no launcher."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from omn_dist.cli import main
from omn_dist.train.metrics import read_rows

CONFIGS = Path(__file__).parents[2] / "configs"
MICRO = Path(__file__).parents[1] / "micro.yaml"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def _fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command prints for wrong input."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert not dist.is_initialized()
    return lines[0]


def test_no_argument_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    output = capsys.readouterr().out
    for command in ("train", "routes", "plan", "data"):
        assert command in output


def test_routes_of_omn_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["routes", str(CONFIGS / "omn1_193b.yaml")]) == 0
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines()]
    assert ["Muon", "0", "0.01", "196", "196", "1,240,465,408", "82.5216%"] in [row[:7] for row in rows]
    assert ["AdamW", "-", "-", "0", "0", "0", "0.0000%"] in [row[:7] for row in rows]
    assert ["AdamW", "0", "0.0003", "86", "87", "262,734,848", "17.4784%"] in [row[:7] for row in rows]
    assert "unique parameters: 1,503,200,256" in output
    assert "state_dict entries: 283" in output
    assert "weight decay in effect: 0 on 282 tensors" in output
    assert "optimizer.weight_decay: configured 0.01, in effect on 0 tensors" in output


def test_routes_of_a_run_as_json_and_as_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "roles.png"
    assert main(["routes", str(MICRO), "model.num_layers=1", "--json", "--picture", str(picture)]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {found["role"] for found in objects} == {"embedding", "projection", "norm"}
    assert sum(found["algorithm"] == "muon" for found in objects) == 7
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "expected a file name" in _fails(capsys, "routes", str(MICRO), "--picture", "roles.gif")


def test_routes_of_a_function(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_model_for_routes.py").write_text(
        "from torch import nn\n"
        "from omn_dist.roles import declare_view\n"
        "def build():\n"
        "    model = nn.Sequential(nn.Linear(4, 12, bias=False), nn.LayerNorm(12))\n"
        "    declare_view(model[0], (3, 4, 4))\n"
        "    return model\n"
        "def number():\n"
        "    return 7\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["routes", "my_model_for_routes:build", "--all"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"0\.weight +12 x 4 +projection +Muon +\(3, 4, 4\) +view declared on 0", output)
    assert re.search(r"projection +Muon +yes +1 +3 +48 +66\.6667% ", output)
    assert "returned int" in _fails(capsys, "routes", "my_model_for_routes:number")
    assert "cannot find the function" in _fails(capsys, "routes", "my_model_for_routes:absent")
    assert "no overrides" in _fails(capsys, "routes", "my_model_for_routes:build", "a=1")


def test_plan_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(CONFIGS / "omn1_193b.yaml"), "--ranks", "2,8"]) == 0
    text = capsys.readouterr().out
    # fp32: momentum of 1,240,465,408 elements, two moments of 262,734,848, and 86 step counters.
    assert "7,063,740,760 (muon 4,961,861,632, adamw 2,101,879,128)" in text
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    assert [row[0] for row in rows] == ["ranks", "2", "8"]
    for row in rows[1:]:
        assert 1.0 <= float(row[2]) <= 1.005


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule.total_token=1"], "did you mean 'schedule.total_tokens'"),
        (["model.head_dim=7"], "model.head_dim: found 7"),
        (["model.vocab_size=256"], "model.vocab_size: found 256, expected at least 257"),
        (["data.sequence_length=100000000"], "data.sequence_length: found 100000000"),
        (["logging.validation_batches=100000000"], "logging.validation_batches: found 100000000"),
        (["data.source=shards", "data.path=/nowhere/shards"], "/nowhere/shards"),
        (["checkpoint.resume=/nowhere/step_00000001"], "/nowhere/step_00000001: no such folder"),
        (["batch.global_batch=3"], "batch.global_batch: found 3 on"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_wrong_input_is_one_line_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], run: Path, overrides: list[str], message: str, check: bool
) -> None:
    options = ["--check", "--ranks", "2"] if check else []
    if not check and message.startswith("batch.global_batch"):
        overrides = ["batch.global_batch=3", "batch.micro_batch=2"]
        message = "expected a divisor of 3"
    line = _fails(capsys, "train", str(MICRO), f"run_folder={run}", *overrides, *options)
    assert message in line
    assert not run.exists()


def test_more_wrong_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "cannot read the configuration" in _fails(capsys, "train", str(tmp_path / "absent.yaml"))
    assert "invalid choice: 'trian'" in _fails(capsys, "trian", str(MICRO))
    assert "unrecognized arguments: --chekc" in _fails(capsys, "train", str(MICRO), "--chekc")
    assert "the following arguments are required: CONFIG" in _fails(capsys, "train")
    assert "--ranks: found 'two'" in _fails(capsys, "plan", str(MICRO), "--ranks", "two")
    assert "--ranks: found 0" in _fails(capsys, "train", str(MICRO), "--check", "--ranks", "0")
    assert "--ranks: found 2" in _fails(capsys, "train", str(MICRO), "--ranks", "2")
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file, expected a folder" in _fails(capsys, "train", str(MICRO), f"run_folder={file}/run")
    assert "found no file or folder" in _fails(capsys, "data", "prepare", str(tmp_path / "no"), "--out", str(tmp_path / "o"))


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for options in (["--check"], []):
        assert "device: found 0 GPUs" in _fails(capsys, "train", str(MICRO), "device=cuda", *options)


def test_only_the_first_rank_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["routes", "absent.yaml"]) == 2
    assert capsys.readouterr().err == ""


def test_train_check_and_train_again(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    arguments = ["train", str(MICRO), f"run_folder={run}", "stop_after_steps=2", "precision.deterministic=true"]
    assert main([*arguments, "--check"]) == 0
    assert "ready: 1 ranks, 2 steps" in capsys.readouterr().out
    assert not run.exists()

    assert main(arguments) == 0
    record = json.loads((run / "record.json").read_text())
    assert record["precision"]["matmul_tf32"] is False
    assert record["optimizer"]["configured"]["weight_decay"] == 0.01
    assert {group["weight_decay"] for group in record["optimizer"]["effective"].values()} == {0.0}
    assert record["plans"][0]["hash"]
    assert record["result"]["steps"] == 2
    rows = read_rows(run / "metrics.jsonl")
    assert [(row["kind"], row["step"]) for row in rows] == [("validation", 0), ("train", 1), ("train", 2), ("validation", 2)]
    first = rows[1]
    assert first["learning_rates"] == {"muon": 0.02, "adamw": 0.01}
    assert set(first["gradient_norms"]) == set(first["update_norms"]) == {"muon", "adamw"}
    assert first["tokens_per_second"] > 0
    assert (run / "loss_curve.png").read_bytes().startswith(b"\x89PNG")

    # A run that is complete takes no step when it is started again, and changes no result.
    assert main(arguments) == 0
    assert read_rows(run / "metrics.jsonl") == rows
    assert main([*arguments, "checkpoint.resume=none"]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_training_without_matplotlib_succeeds_and_says_so(
    capsys: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["train", str(MICRO), f"run_folder={run}", "stop_after_steps=1"]) == 0
    assert "matplotlib is not installed" in capsys.readouterr().err
    assert not (run / "loss_curve.png").exists()
    assert (run / "record.json").exists()


def test_too_many_rejected_windows_end_the_run(
    capsys: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omn_dist.models import OMN

    forward = OMN.forward

    def broken(self, tokens, targets=None):  # type: ignore[no-untyped-def]
        loss = forward(self, tokens, targets)
        return loss * float("nan") if self.training else loss

    monkeypatch.setattr(OMN, "forward", broken)
    assert main(["train", str(MICRO), f"run_folder={run}", "batch.max_consecutive_rejected=3"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("omn-dist: 3 windows in a row were rejected after step 0")
    rows = read_rows(run / "metrics.jsonl")
    assert [row["kind"] for row in rows] == ["validation"] + ["rejected"] * 3
    assert "loss on rank 0 and gradient of 'layers.0" in rows[1]["not_finite"]
    assert not (run / "checkpoints").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    assert main(["train", str(MICRO), f"run_folder={folder}", "stop_after_steps=2", "checkpoint.every_steps=1"]) == 0
    return folder


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("manifest.json", "remove"),
        ("manifest.json", "truncate"),
        (".metadata", "remove"),
        (".metadata", "truncate"),
        ("__0_0.distcp", "remove"),
        ("__0_0.distcp", "truncate"),
        ("run.json", "truncate"),
        (".metadata", "scribble"),
        ("__0_0.distcp", "scribble"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(
    capsys: pytest.CaptureFixture[str], saved: Path, run: Path, name: str, damage: str
) -> None:
    shutil.copytree(saved, run)
    file = run / "checkpoints" / "step_00000002" / name
    if damage == "remove":
        file.unlink()
    elif damage == "truncate":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        file.write_bytes(b"\xff" * file.stat().st_size)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    arguments = ["train", str(MICRO), f"run_folder={run}", "stop_after_steps=3"]
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    # Only tensor data are read after the optimizer is there, which has logged its plan by then.
    assert len(lines) == (2 if (name, damage) == ("__0_0.distcp", "scribble") else 1)
    assert re.fullmatch(r"omn-dist: checkpoint .*step_00000002: .*; .*checkpoint.resume", lines[-1])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert not dist.is_initialized()
    if len(lines) == 1:
        assert _fails(capsys, *arguments, "--check") == lines[0]


def test_another_configuration_is_refused_by_name_and_steps_may_change(
    capsys: pytest.CaptureFixture[str], saved: Path, run: Path
) -> None:
    shutil.copytree(saved, run)
    arguments = ["train", str(MICRO), f"run_folder={run}", "--check"]
    for override, message in (
        ("model.num_layers=3", "model.num_layers 2 -> 3"),
        ("data.seed=5", "data.seed 0 -> 5"),
        ("optimizer.overrides.lr=0.5", "optimizer.overrides.lr 0.02 -> 0.5"),
        ("seed=9", "seed 0 -> 9"),
        ("batch.global_batch=8", "batch.global_batch 4 -> 8"),
        ("schedule.floor=0.1", "schedule.floor"),
    ):
        assert message in _fails(capsys, *arguments, override)
    for override in (
        "schedule.total_tokens=100000",
        "logging.validation_every_steps=7",
        "stop_after_steps=9",
        "optimizer.batch_invariant=false",
        "optimizer.kernels=torch",
    ):
        assert main([*arguments, override]) == 0
    output = capsys.readouterr().out
    assert "differs from the checkpoint: schedule.total_tokens" in output
    assert "differs from the checkpoint: optimizer.batch_invariant True -> False" in output
    assert "differs from the checkpoint: optimizer.kernels 'auto' -> 'torch'" in output


def test_an_older_checkpoint_is_not_continued_over_a_newer_one(capsys: pytest.CaptureFixture[str], saved: Path, run: Path) -> None:
    older = saved / "checkpoints" / "step_00000001"
    arguments = ["train", str(MICRO), f"checkpoint.resume={older}"]
    assert "newer than step_00000001 (step_00000002)" in _fails(capsys, *arguments, f"run_folder={saved}")
    assert main([*arguments, f"run_folder={run}", "stop_after_steps=2"]) == 0
    assert [row["step"] for row in read_rows(run / "metrics.jsonl") if row["kind"] == "train"] == [2]


def test_a_start_is_for_a_fresh_folder_and_the_same_command_continues(
    capsys: pytest.CaptureFixture[str], saved: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``none`` and a path mean the same on a second start: go on from the newest own checkpoint."""
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    other = run.with_name("other")
    first = saved / "checkpoints" / "step_00000001"
    for folder, start, steps in ((run, "none", [1, 2, 3]), (other, str(first), [2, 3])):
        arguments = ["train", str(MICRO), f"run_folder={folder}", f"checkpoint.resume={start}", "checkpoint.keep=1"]
        assert main([*arguments, "stop_after_steps=2"]) == 0
        capsys.readouterr()
        assert main([*arguments, "stop_after_steps=3"]) == 0
        error = capsys.readouterr().err
        assert f"checkpoint.resume={start} is for a fresh run_folder; {folder} was started with it before" in error
        assert "step_00000002 at step 2 of 3" in error
        assert [row["step"] for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "train"] == steps

    # Another start in that folder may mean a new run, or this one.
    arguments = ["train", str(MICRO), "stop_after_steps=4", f"run_folder={run}"]
    for start in (first, saved / "checkpoints" / "step_00000002"):
        line = _fails(capsys, *arguments, f"checkpoint.resume={start}")
        assert "holds a run already (record.json, started with checkpoint.resume=none), expected an empty one" in line
    # SLURM starts only the same command again, whoever has written the record since.
    assert main([*arguments[:2], "stop_after_steps=3", f"run_folder={run}"]) == 0
    capsys.readouterr()
    assert "started with checkpoint.resume=auto" in _fails(capsys, *arguments, "checkpoint.resume=none")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert main([*arguments, "checkpoint.resume=none"]) == 0
    assert "step_00000003 at step 3 of 4" in capsys.readouterr().err


def test_a_second_start_without_a_checkpoint_starts_where_the_first_did(saved: Path, run: Path) -> None:
    for folder, start, step in ((run, "none", 0), (run.with_name("other"), saved / "checkpoints" / "step_00000001", 1)):
        arguments = ["train", str(MICRO), f"run_folder={folder}", f"checkpoint.resume={start}", "stop_after_steps=2"]
        assert main(arguments) == 0
        shutil.rmtree(folder / "checkpoints")
        assert main(arguments) == 0
        assert [row["step"] for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "train"] == [1, 2][step:]


def test_prepare_and_train_on_shards(capsys: pytest.CaptureFixture[str], tmp_path: Path, run: Path) -> None:
    for number in range(3):
        (tmp_path / f"text_{number}.txt").write_text(f"the text of file {number}, line by line\n" * 400)
    shards = tmp_path / "shards"
    assert main(["data", "prepare", *(str(path) for path in sorted(tmp_path.glob("*.txt"))), "--out", str(shards)]) == 0
    assert "vocabulary 257" in capsys.readouterr().out
    overrides = ["data.source=shards", f"data.path={shards}", f"run_folder={run}", "stop_after_steps=1"]
    assert main(["train", str(MICRO), *overrides]) == 0
