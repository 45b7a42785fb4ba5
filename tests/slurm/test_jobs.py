"""Jobs on a real SLURM with two nodes: submission, interruption, requeueing, and wrong input."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, until
from hosts import kill
from launching import ARGUMENTS, MICRO, REPOSITORY, STEPS
from runs import assert_bitwise, comparable

from omn_dist.launch.network import port_of_job

pytestmark = [pytest.mark.slurm, pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPTS = sorted((REPOSITORY / "slurm").glob("*.sbatch"))
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def submit(
    cluster: Cluster,
    folder: Path,
    *arguments: str,
    options: tuple[str, ...] = (),
    pace: Path | None = None,
    launcher: str = "torchrun",
) -> int:
    """``sbatch slurm/train.sbatch`` on two nodes; the job's number."""
    export = "ALL"
    if pace is not None:
        export += f",SLOW_STEPS={pace},PYTHONPATH={Path(__file__).parent / 'slow'}"
    return cluster.submit(
        "--nodes=2", f"--output={folder}/slurm-%j.log", f"--chdir={REPOSITORY}", f"--export={export}", *options,
        str(REPOSITORY / "slurm" / "train.sbatch"), f"--repository={REPOSITORY}", f"--environment={environment_folder()}",
        f"--launcher={launcher}", "--ranks-per-node=1", *ARGUMENTS, f"run_folder={folder / 'run'}", *arguments,
    )  # fmt: skip


def environment_folder() -> Path:
    """The virtual environment, or prefix, of this Python."""
    return Path(sys.executable).parents[1]


def steps_taken(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_text().count('"kind": "train"') if metrics.exists() else 0


def until_steps(cluster: Cluster, job: int, folder: Path, steps: int) -> None:
    until(
        lambda: steps_taken(folder) >= steps or cluster.show(job)["JobState"] in ENDED,
        lambda: f"{steps_taken(folder)} steps\n{cluster.log(job)}",
    )
    assert steps_taken(folder) >= steps, cluster.log(job)


def saved_steps(folder: Path) -> list[int]:
    checkpoints = folder / "run" / "checkpoints"
    return sorted(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_????????"))


@pytest.fixture
def pace(tmp_path: Path) -> Iterator[Path]:
    """Seconds that each step waits, to be changed while a job runs."""
    path = tmp_path / "pace"
    path.write_text("0.2")
    yield path
    path.write_text("0")


def test_preempted_then_out_of_time_then_finished_bitwise(
    cluster: Cluster, tmp_path: Path, pace: Path, uninterrupted: Path
) -> None:
    job = submit(cluster, tmp_path, pace=pace, options=("--time=30", "--signal=USR1@90"))
    until_steps(cluster, job, tmp_path, 2)

    # A job of a higher partition takes the nodes: SLURM sends SIGTERM and gives a minute.
    other = cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    cluster.wait(other, "COMPLETED")
    shown = cluster.wait(job, "RUNNING")
    assert shown["Restarts"] == "1"
    (preempted,) = saved_steps(tmp_path)
    assert 2 <= preempted < STEPS
    assert f"saved step {preempted} of {STEPS}" in cluster.log(job)

    # Its time ends: SLURM checks every half minute, and sends SIGUSR1 90 seconds before the limit.
    pace.write_text("1.5")
    until(lambda: steps_taken(tmp_path) > preempted, lambda: cluster.log(job))
    minutes = int(cluster.show(job)["RunTime"].split(":")[1])
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")
    shown = cluster.wait(job, "PENDING", *ENDED)
    assert shown["JobState"] == "PENDING", cluster.log(job)
    limited = saved_steps(tmp_path)[-1]
    assert preempted < limited < STEPS
    pace.write_text("0")
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")

    shown = cluster.wait(job, *ENDED)
    log = cluster.log(job)
    ended = (shown["JobState"], shown["ExitCode"], shown["Restarts"])
    assert ended == ("COMPLETED", "0:0", "2"), f"{log}\n{cluster.logs()}"
    assert log.count("it continues from the newest complete checkpoint") == 2
    assert f"continuing {tmp_path}/run/checkpoints/step_{limited:08d} at step {limited} of {STEPS}" in log
    # No signal ended a rank, and nobody wrote a trace.
    assert "Traceback" not in log
    assert_bitwise(tmp_path / "run", uninterrupted, STEPS)
    assert comparable(tmp_path / "run") == comparable(uninterrupted)
    logs = sorted(path.name for path in (tmp_path / "run" / "logs").iterdir())
    assert logs == [f"job_{job}_restart_{restart}" for restart in range(3)]


@pytest.mark.parametrize("resume", ["none", "path"])
def test_a_requeued_job_continues_wherever_it_has_started_from(
    cluster: Cluster, tmp_path: Path, pace: Path, uninterrupted: Path, resume: str
) -> None:
    """A path is that of a checkpoint of another run, which is gone when the job starts again."""
    start, first = resume, 0
    if resume == "path":
        (tmp_path / "other").mkdir()
        early = submit(cluster, tmp_path / "other", "stop_after_steps=3")
        cluster.wait(early, "COMPLETED")
        start, first = str(tmp_path / "other" / "run" / "checkpoints" / "step_00000003"), 3
    job = submit(cluster, tmp_path, f"checkpoint.resume={start}", pace=pace)
    until_steps(cluster, job, tmp_path, 2)
    other = cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    cluster.wait(other, "COMPLETED")
    (preempted,) = saved_steps(tmp_path)
    shutil.rmtree(tmp_path / "other", ignore_errors=True)
    pace.write_text("0")
    shown = cluster.wait(job, *ENDED)
    log = cluster.log(job)
    ended = (shown["JobState"], shown["ExitCode"], shown["Restarts"])
    assert ended == ("COMPLETED", "0:0", "1"), f"{log}\n{cluster.logs()}"
    assert f"continuing {tmp_path}/run/checkpoints/step_{preempted:08d} at step {preempted} of {STEPS}" in log
    assert_bitwise(tmp_path / "run", uninterrupted, STEPS)
    rows = [row for row in comparable(uninterrupted) if row["window"] > first or not first]
    assert comparable(tmp_path / "run") == rows


def test_a_dead_node_costs_the_steps_since_the_checkpoint_and_no_more(
    cluster: Cluster, tmp_path: Path, pace: Path, uninterrupted: Path
) -> None:
    job = submit(cluster, tmp_path, "checkpoint.every_steps=3", pace=pace)
    until_steps(cluster, job, tmp_path, 5)
    cluster.kill_node(cluster.second)
    shown = cluster.wait(job, "PENDING", *ENDED)
    assert shown["JobState"] == "PENDING", cluster.log(job)
    saved = saved_steps(tmp_path)[-1]
    assert saved >= 3
    pace.write_text("0")
    cluster.start_node(cluster.second)
    shown = cluster.wait(job, *ENDED)
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1"), f"{shown}\n{cluster.log(job)}\n{cluster.logs()}"
    assert f"at step {saved} of {STEPS}" in cluster.log(job)
    assert_bitwise(tmp_path / "run", uninterrupted, STEPS)
    assert comparable(tmp_path / "run") == comparable(uninterrupted)


def test_a_cancelled_job_saves_and_stays_cancelled(cluster: Cluster, tmp_path: Path, pace: Path) -> None:
    """One task for each rank; the port that the job derives from its number is taken."""
    # Numbers are given in turn, and this one goes to a job that runs at once and is gone.
    number = cluster.submit("--output=/dev/null", "--wrap=true") + 1
    port = port_of_job(number)
    listen = f"import socket, time; s = socket.create_server(('', {port})); print('there', flush=True); time.sleep(600)"
    squatter = cluster.first.start(sys.executable, "-c", listen, stdout=subprocess.PIPE)
    assert squatter.stdout is not None
    assert squatter.stdout.readline() == "there\n"
    try:
        job = submit(cluster, tmp_path, pace=pace, launcher="srun")
        assert job == number
        until_steps(cluster, job, tmp_path, 2)
        assert f"meeting at {cluster.first.address}:{port + 1}" in cluster.log(job)
        cluster.run("scancel", str(job))
        shown = cluster.wait(job, *ENDED)
        assert (shown["JobState"], shown["Restarts"]) == ("CANCELLED", "0"), cluster.log(job)
        until(lambda: bool(saved_steps(tmp_path)), lambda: cluster.log(job), 30)
        assert saved_steps(tmp_path)[0] >= 2
        assert cluster.show(job)["JobState"] == "CANCELLED"
    finally:
        kill([squatter.pid])
        squatter.wait()


def test_a_run_that_fails_by_itself_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """Every node answers, so it would fail again: the learning rate makes weights not finite."""
    job = submit(cluster, tmp_path, "optimizer.overrides.lr=1e38", "batch.max_consecutive_rejected=1")
    shown = cluster.wait(job, *ENDED)
    log = cluster.log(job)
    assert (shown["JobState"], shown["ExitCode"], shown["Restarts"]) == ("FAILED", "1:0", "0"), log
    assert "omn-dist: 1 windows in a row were rejected after step" in log
    assert "all nodes answer: the failure is the run's own, not requeued" in log


def refused(cluster: Cluster, job: int) -> list[str]:
    """The lines with which a job that cannot run has ended."""
    shown = cluster.wait(job, *ENDED)
    log = cluster.log(job)
    assert (shown["JobState"], shown["ExitCode"], shown["Restarts"]) == ("FAILED", "2:0", "0"), log
    return [line for line in log.splitlines() if line.startswith("omn-dist: ")]


def test_without_scontrol_the_job_ends_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM's commands are not on the path of the job, and no node starts a run of its own."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("srun", "bash", "env", "hostname", "timeout", "grep", "sleep", "mkdir"):
        found = cluster.run("sh", "-c", f"command -v {name}").strip()
        (commands / name).symlink_to(found)
    (line,) = refused(cluster, submit(cluster, tmp_path, options=(f"--export=ALL,PATH={commands}",)))
    assert "scontrol: not found on PATH" in line
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_not_shared_is_named(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    cluster.second.run("mount", "-t", "tmpfs", "none", str(folder))
    try:
        (line,) = refused(cluster, submit(cluster, tmp_path))
    finally:
        cluster.second.run("umount", str(folder))
    assert line.startswith(f"omn-dist: run_folder {folder}: n1 does not see what n0 writes there")
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (("--nodes=1", "--ntasks=1"), "SLURM_STEP_NUM_NODES: found 1 nodes in this step, expected the job's 2"),
        (("--nodes=2", "--ntasks=3"), "SLURM_STEP_NUM_TASKS: found 3 tasks on 2 nodes, expected 2, one a node"),
    ],
)
def test_tasks_that_do_not_fit_end_at_once(cluster: Cluster, tmp_path: Path, tasks: tuple[str, ...], message: str) -> None:
    script = tmp_path / "job.sh"
    launch = f"{environment_folder()}/bin/python -m omn_dist launch {MICRO} run_folder={tmp_path / 'run'}"
    script.write_text(f"#!/bin/sh\nexport MASTER_ADDR={cluster.first.address}\nexec srun {' '.join(tasks)} {launch}\n")
    job = cluster.submit("--nodes=2", "--ntasks=3", f"--output={tmp_path}/job.log", f"--chdir={REPOSITORY}", str(script))
    lines = refused(cluster, job)
    assert {line for line in lines if message in line} == set(lines)
    assert lines
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_slurm_accepts_every_script(cluster: Cluster, script: Path) -> None:
    answer = cluster.run("sbatch", "--test-only", "--nodes=2", str(script), str(MICRO))
    assert re.search(r"Job \d+ to start at", answer), answer


def test_submit_starts_the_job_that_it_prints(cluster: Cluster, tmp_path: Path) -> None:
    """From YAML, with copies in the run folder. The input is wrong, so that nothing long runs."""
    job_file = tmp_path / "job.yaml"
    job_file.write_text(
        f"config: {MICRO}\nnodes: 2\nranks_per_node: 3\ntime: '20'\nenvironment: {environment_folder()}\n"
        f"overrides: [run_folder={tmp_path / 'run'}]\n"
    )
    output = cluster.run(f"{environment_folder()}/bin/python", "-m", "omn_dist", "submit", str(job_file))
    command, _, answer = output.strip().rpartition("\n")
    job = int(answer.removeprefix("Submitted batch job "))
    (line,) = refused(cluster, job)
    assert "batch.global_batch: found 4 on 6 ranks" in line
    assert (tmp_path / "run" / "submit.txt").read_text() == command + "\n"
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"job.yaml", "config.yaml", "submit.txt", f"slurm-{job}.log"}


def test_an_array_task_and_a_benchmark_say_what_is_wrong_before_they_start(cluster: Cluster, tmp_path: Path) -> None:
    """Task 2 of the array has a configuration that four ranks cannot run, and says so."""
    runs = tmp_path / "runs.txt"
    runs.write_text("# name, overrides\none seed=1\n\ntwo batch.global_batch=3\n")
    common = [f"--repository={REPOSITORY}", f"--environment={environment_folder()}", "--ranks-per-node=2"]
    folder = f"run_folder={tmp_path / 'run'}"
    jobs = [
        cluster.submit(*options, "--nodes=2", f"--output={tmp_path}/%j.log", f"--chdir={REPOSITORY}", *script, str(MICRO), folder)
        for options, script in (
            (["--array=2"], [str(REPOSITORY / "slurm" / "array.sbatch"), *common, f"--list={runs}"]),
            ([], [str(REPOSITORY / "slurm" / "benchmark.sbatch"), *common[:2], "--ranks-per-node=3"]),
        )
    ]
    assert "batch.global_batch: found 3 on 4 ranks" in refused(cluster, jobs[0])[0]
    assert "batch.global_batch: found 4 on 6 ranks" in refused(cluster, jobs[1])[0]
