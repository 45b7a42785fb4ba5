"""Training runs under torchrun on two gloo ranks: resume, stop, kill, rejection, wrong input."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import assert_bitwise, comparable
from torch import nn

pytestmark = pytest.mark.distributed

MICRO = Path(__file__).parents[1] / "micro.yaml"
WORKER = Path(__file__).with_name("training_worker.py")
NUM_RANKS = 2
TIMEOUT = 120.0


@dataclasses.dataclass
class Job:
    """A torchrun job and the folder in which its ranks leave their exit status."""

    process: "subprocess.Popen[str]"
    folder: Path

    def wait(self) -> str:
        """Wait for the end; the output. A job that hangs is ended and fails the test."""
        try:
            return self.process.communicate(timeout=TIMEOUT)[0]
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError("the job did not end:\n" + self.process.communicate()[0]) from None

    def processes(self) -> list[int]:
        """Process numbers of torchrun and its ranks."""
        return [self.process.pid, *(int(path.read_text()) for path in self.folder.glob("process_*"))]

    def kill(self) -> None:
        """``kill -9`` on everything."""
        for number in self.processes():
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def statuses(self) -> list[int]:
        """Exit status of each rank that came to its end."""
        return [int(path.read_text()) for path in sorted(self.folder.glob("status_*"))]


def start(tmp_path: Path, *arguments: str, fault: str | None = None, seconds_between_looks: float = 0.1) -> Job:
    """Start ``omn-dist train`` on the micro model under torchrun, like launch/train.sh does.

    Torchrun looks every ``seconds_between_looks`` whether a rank has failed, and then ends the
    others.
    """
    folder = tmp_path / f"job_{len(list(tmp_path.glob('job_*')))}"
    folder.mkdir()
    environment = os.environ | {"STATUS_FOLDER": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    if fault is not None:
        environment["FAULT"] = fault
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launcher += ["--nproc-per-node", str(NUM_RANKS), "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    launcher += ["--monitor-interval", str(seconds_between_looks)]
    process = subprocess.Popen(
        [*launcher, str(WORKER), "train", str(MICRO), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Job(process, folder)


def run(tmp_path: Path, *arguments: str, fault: str | None = None) -> str:
    """A job that must succeed; its output."""
    job = start(tmp_path, *arguments, fault=fault)
    output = job.wait()
    assert job.process.returncode == 0, output
    assert job.statuses() == [0] * NUM_RANKS
    return output


def until(condition: Callable[[], bool], job: Job) -> None:
    """Wait for ``condition`` while the job runs."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert job.process.poll() is None, job.process.communicate()[0]
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps without a break, a checkpoint every five."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(folder, f"run_folder={folder / 'run'}", "checkpoint.every_steps=5", "checkpoint.keep=4")
    return folder / "run"


def test_a_run_learns_and_leaves_its_files(uninterrupted: Path) -> None:
    rows = comparable(uninterrupted)
    losses = [row["loss"] for row in rows if row["kind"] == "validation"]
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 21))
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [0, 4, 8, 12, 16, 20]
    assert losses[-1] < losses[0] - 0.5
    record = json.loads((uninterrupted / "record.json").read_text())
    (plan,) = record["plans"]
    assert plan["world_size"] == len(record["ranks"]) == len(plan["flops_by_rank"]) == NUM_RANKS
    assert len(plan["bytes_sent_by_rank"]) == NUM_RANKS
    assert record["result"]["last_validation_loss"] == losses[-1]
    assert sorted(path.name for path in uninterrupted.iterdir()) == [
        "checkpoints",
        "loss_curve.png",
        "metrics.jsonl",
        "record.json",
    ]
    assert [path.name for path in sorted((uninterrupted / "checkpoints").iterdir())] == [
        f"step_{step:08d}" for step in (5, 10, 15, 20)
    ]


def test_ten_steps_and_a_resume_are_bitwise_twenty_steps(tmp_path: Path, uninterrupted: Path) -> None:
    folder = tmp_path / "run"
    run(tmp_path, f"run_folder={folder}", "stop_after_steps=10", "logging.validation_every_steps=4")
    assert_bitwise(folder, uninterrupted, 10)
    # As if the run had gone on and was lost: a step that will be taken again, and half a line.
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 11, "window": 11, "tokens": 0, "loss": 0.0}) + '\n{"kind":')
    output = run(tmp_path, f"run_folder={folder}")
    assert "continuing" in output
    assert_bitwise(folder, uninterrupted, 20)
    # The run that stopped at step 10 has validated there too.
    rows = [row for row in comparable(folder) if (row["kind"], row["step"]) != ("validation", 10)]
    assert rows == comparable(uninterrupted)


@pytest.mark.parametrize("resume", ["auto", "none", "path"])
def test_a_stop_signal_saves_one_step_on_all_ranks_and_the_rest_is_bitwise(
    tmp_path: Path, uninterrupted: Path, resume: str
) -> None:
    """The same command continues, wherever it has started from."""
    folder = tmp_path / "run"
    metrics = folder / "metrics.jsonl"
    first = 5 if resume == "path" else 0
    value = uninterrupted / "checkpoints" / "step_00000005" if resume == "path" else resume
    arguments = (f"run_folder={folder}", f"checkpoint.resume={value}")
    job = start(tmp_path, *arguments)
    until(lambda: metrics.exists() and metrics.read_text().count('"kind": "train"') >= 3, job)
    job.process.send_signal(signal.SIGUSR1)
    output = job.wait()
    assert job.statuses() == [75] * NUM_RANKS, output
    (checkpoint,) = (folder / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step_"))
    assert first + 3 <= step < 20
    assert f"saved step {step} of 20" in output
    for number in job.processes():
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)
    assert f"step_{step:08d} at step {step} of 20" in run(tmp_path, *arguments)
    assert_bitwise(folder, uninterrupted, 20)
    # A run from a checkpoint of another one has not validated before its first step.
    assert comparable(folder) == [row for row in comparable(uninterrupted) if row["window"] > first or not first]


def test_kill_during_a_save_leaves_the_checkpoint_before_it(tmp_path: Path, uninterrupted: Path) -> None:
    folder = tmp_path / "run"
    arguments = (f"run_folder={folder}", "checkpoint.every_steps=5")
    job = start(tmp_path, *arguments, fault="pause:10")
    until((job.folder / "paused").exists, job)
    job.kill()
    job.wait()
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_00000005", "step_00000010.partial"}
    assert any((folder / "checkpoints" / "step_00000010.partial").iterdir())
    output = run(tmp_path, *arguments)
    assert "step_00000005 at step 5 of 20" in output
    assert_bitwise(folder, uninterrupted, 20)
    assert comparable(folder) == comparable(uninterrupted)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_00000015", "step_00000020"}


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_bad_window_is_rejected_by_all_ranks_and_leaves_no_trace(tmp_path: Path, overlap: str) -> None:
    arguments = ("stop_after_steps=8", "checkpoint.every_steps=8")
    rejecting, skipping = tmp_path / "rejecting", tmp_path / "skipping"
    # With overlap, directions of the bad window have left for their owners when it is rejected.
    output = run(tmp_path, f"run_folder={rejecting}", *arguments, f"optimizer.overlap_backward={overlap}", fault="nan:3")
    run(tmp_path, f"run_folder={skipping}", *arguments, fault="skip:3")
    assert_bitwise(rejecting, skipping, 8)
    assert "window 4 rejected, not finite: gradient of 'layers.1.feed_forward.up_proj.weight' on rank 1" in output
    found, expected = comparable(rejecting), comparable(skipping)
    (rejected,) = (row for row in found if row["kind"] == "rejected")
    assert (rejected["step"], rejected["window"], rejected["rejected"]) == (3, 4, 1)
    counts = ("window", "rejected")
    assert [{key: row[key] for key in row if key not in counts} for row in found if row["kind"] != "rejected"] == [
        {key: row[key] for key in row if key not in counts} for row in expected
    ]


def test_an_exception_on_one_rank_ends_the_job_and_is_shown(tmp_path: Path) -> None:
    job = start(tmp_path, f"run_folder={tmp_path / 'run'}", fault="raise:2")
    started = time.monotonic()
    output = job.wait()
    assert time.monotonic() - started < 60
    assert job.process.returncode != 0
    assert "this rank fails on purpose" in output
    assert job.statuses() == []


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("batch.global_batch=3", "batch.global_batch: found 3 on 2 ranks"),
        ("data.sequence_lenght=3", "did you mean 'data.sequence_length'"),
    ],
)
def test_wrong_input_under_torchrun_is_one_line_and_the_same_status_on_all_ranks(
    tmp_path: Path, argument: str, message: str
) -> None:
    # Each rank finds it out for itself, and one may have started a second before the other.
    job = start(tmp_path, f"run_folder={tmp_path / 'run'}", argument, seconds_between_looks=10)
    output = job.wait()
    assert job.statuses() == [2] * NUM_RANKS, output
    assert [line for line in output.splitlines() if line.startswith("omn-dist: ")] == [
        line for line in output.splitlines() if message in line
    ]
    assert output.count(message) == 1
    assert not (tmp_path / "run").exists()


def _measure_sharded() -> tuple[dict[str, float], dict[str, float], float, list[Any]]:
    """Gradient norms, update norms, clip factor and clipped gradients of sharded parameters.

    Some shards are uneven, and some parameters are replicated.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from omn_dist.train.norms import UpdateNorms, view_groups
    from omn_dist.train.window import clip_gradients, judge_window

    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    generator = torch.Generator().manual_seed(0)

    def parameter(shape: tuple[int, ...], placement: Any) -> nn.Parameter:
        weight, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
        if mesh is not None and placement is not None:
            weight, gradient = (distribute_tensor(whole, mesh, [placement]) for whole in (weight, gradient))
        result = nn.Parameter(weight)
        result.grad = gradient * 10
        return result

    kinds = [((7, 3), Shard(0)), ((1, 4), Shard(0)), ((5, 2), Replicate()), ((6,), None)]
    groups = []
    for algorithm in ("muon", "adamw"):
        parameters = [parameter(*kind) for kind in kinds]
        names = [f"{algorithm}.{number}" for number in range(len(kinds))]
        groups.append({"params": parameters, "param_names": names, "algorithm": algorithm, "weight_decay": 0.0})
    views = view_groups(groups)
    verdict = judge_window(views, torch.tensor(1.0), stop=False)
    updates = UpdateNorms(views, torch.device("cpu"))
    updates.remember()
    with torch.no_grad():
        for view in views:
            for p in view.parameters:
                p.add_(p.grad, alpha=-0.1)
    measured = updates.measure()
    factor = clip_gradients(views, verdict, 1.0)
    gradients = [p.grad for view in views for p in view.parameters]
    whole = [g.full_tensor() if mesh is not None and hasattr(g, "full_tensor") else g for g in gradients]
    return verdict.gradient_norms, measured, factor, [g.tolist() for g in whole]


@pytest.mark.parametrize("world_size", [2, 3])
def test_norms_and_clipping_equal_one_process(world_size: int) -> None:
    norms, updates, factor, gradients = _measure_sharded()
    for found in run_ranks(world_size, _measure_sharded):
        assert found[0] == pytest.approx(norms, rel=1e-5)
        assert found[1] == pytest.approx(updates, rel=1e-5)
        assert found[2] == pytest.approx(factor, rel=1e-5)
        for position, (mine, expected) in enumerate(zip(found[3], gradients, strict=True)):
            exact = position < len(gradients) // 2  # Muon's gradients do not change
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(expected), rtol=0 if exact else 1e-5, atol=0)
