"""Checks, layouts, statuses and commands of the launchers, in one process."""

import dataclasses
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from omn_dist.cli import main
from omn_dist.launch.agent import SignalRelay, combined_status
from omn_dist.launch.checks import (
    check_disk,
    check_gpus,
    check_interface_choice,
    check_shared,
    checkpoint_bytes,
    compare_members,
)
from omn_dist.launch.job_layout import read_layout, tasks_by_node
from omn_dist.launch.meeting import Meeting
from omn_dist.launch.network import Interface, list_interfaces, next_free_port, port_of_job
from omn_dist.launch.submit import JobConfig, sbatch_command, time_limit_seconds
from omn_dist.settings import SettingsError, from_mapping
from omn_dist.studies.throughput import throughput_table
from omn_dist.train.meeting_point import MissingMembersError, check_address, resolve, source_address, why_not_free

REPOSITORY = Path(__file__).parents[2]
MICRO = REPOSITORY / "tests" / "micro.yaml"

STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "20007",
}


def test_a_layout_from_slurm_and_from_a_person() -> None:
    layout = read_layout(STEP, 8)
    assert (layout.num_nodes, layout.node_rank, layout.world_size, layout.port) == (2, 1, 16, 20007)
    by_rank = read_layout(STEP | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8, "srun")
    assert dataclasses.replace(by_rank, origin=layout.origin) == layout
    by_hand = read_layout({"NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "20007"}, 8)
    assert dataclasses.replace(by_hand, origin=layout.origin) == layout
    assert read_layout({}, 1).address == "127.0.0.1"


@pytest.mark.parametrize(
    ("changes", "ranks_per_node", "launcher", "message"),
    [
        ({"MASTER_ADDR": ""}, 1, "torchrun", "MASTER_ADDR: not set, but the run has 2 machines"),
        ({"SLURM_STEP_NUM_TASKS": "3"}, 1, "torchrun", "found 3 tasks on 2 nodes, expected 2, one a node"),
        ({"SLURM_STEP_NUM_NODES": "1"}, 1, "torchrun", "found 1 nodes in this step, expected the job's 2"),
        ({}, 4, "srun", "found 2 tasks on 2 nodes, expected 8, one a rank, 4 a node"),
        (
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "3,1"},
            2,
            "srun",
            "SLURM_STEP_TASKS_PER_NODE: found 3,1, expected 2 on every node",
        ),
        ({"SLURM_JOB_NUM_NODES": "two"}, 1, "torchrun", "SLURM_JOB_NUM_NODES: found 'two', expected a whole number"),
        ({}, 0, "torchrun", "ranks per node: found 0"),
    ],
)
def test_counts_that_contradict_each_other(changes: dict[str, str], ranks_per_node: int, launcher: Any, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        read_layout(STEP | changes, ranks_per_node, launcher)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR: not set"),
        ({"NODES": "2", "MASTER_ADDR": "10.0.0.1"}, "NODE_RANK: not set, but NODES is 2"),
        ({"NODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "10.0.0.1"}, "NODE_RANK: found 2 with NODES=2"),
    ],
)
def test_nothing_is_guessed_where_there_are_several_machines(environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_layout(environment, 1)


def test_tasks_by_node() -> None:
    assert tasks_by_node("2(x3),1") == (2, 2, 2, 1)
    with pytest.raises(SettingsError, match="expected the form"):
        tasks_by_node("2x3")


def test_addresses() -> None:
    assert check_address("a", ["10.0.0.1"], 2) == []
    assert check_address("a", ["127.0.1.1"], 1) == []
    (line,) = check_address("a", ["127.0.1.1"], 2)
    assert "'a' is 127.0.1.1 here" in line
    assert "is ::1 here" in check_address("a", ["::1"], 3)[0]
    assert "is 0.0.0.0 here" in check_address("a", ["0.0.0.0"], 2)[0]
    assert "resolves to no address" in check_address("no.such.host.invalid", resolve("no.such.host.invalid"), 1)[0]
    assert resolve("127.0.0.1") == ("127.0.0.1",)
    assert source_address("127.0.0.1") == "127.0.0.1"


def test_interfaces() -> None:
    found = {interface.name: interface for interface in list_interfaces()}
    assert found["lo"] == Interface(name="lo", address="127.0.0.1", is_up=True)
    assert found["lo"].is_loopback
    interfaces = (
        found["lo"],
        Interface(name="eth0", address="10.0.0.2", is_up=True),
        Interface(name="ib0", address=None, is_up=True),
        Interface(name="ib1", address="10.1.0.2", is_up=False),
    )

    def lines(choice: str, variable: str = "GLOO_SOCKET_IFNAME", num_nodes: int = 2) -> str:
        return "".join(check_interface_choice(variable, choice, interfaces, num_nodes))

    assert lines("eth0") == lines("eth", "NCCL_SOCKET_IFNAME") == lines("=eth0", "NCCL_SOCKET_IFNAME") == ""
    assert lines("lo", num_nodes=1) == lines("^docker", "NCCL_SOCKET_IFNAME") == ""
    assert "found no interface 'eth'" in lines("eth")
    assert "is a loopback" in lines("lo")
    assert "is down or has no IPv4 address" in lines("ib0")
    assert "is down or has no IPv4 address" in lines("ib1")


def test_ports() -> None:
    assert [port_of_job(job) for job in (7, 8, 10_007)] == [20_007, 20_008, 20_007]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert why_not_free(port) == "Address already in use"
        assert next_free_port(port) > port
    assert why_not_free(port) is None


def test_disk_counts_weights_and_state_of_two_checkpoints() -> None:
    matrix, gain = torch.empty(10, 10, device="meta"), torch.empty(5, device="meta")
    groups = [{"algorithm": "muon", "params": [matrix]}, {"algorithm": "adamw", "params": [gain]}]
    # AdamW's step counter is one fp32 number for each parameter.
    assert checkpoint_bytes(groups) == 4 * (100 * 2 + 5 * 3 + 1)
    assert check_disk(Path("runs"), 1720, 860, num_saved=0) == []
    (line,) = check_disk(Path("runs"), 3 << 29, 1 << 30, num_saved=0)
    assert "found 1.50 GiB free, expected at least 2.00 GiB for 2 checkpoints" in line
    # A requeued job has the last checkpoint already, which took the room that was there at first.
    assert check_disk(Path("runs"), 3 << 29, 1 << 30, num_saved=1) == []
    assert check_disk(Path("runs"), 3 << 29, 1 << 30, num_saved=7) == []
    assert "expected at least 1.00 GiB for 1 checkpoint;" in check_disk(Path("runs"), 1 << 29, 1 << 30, num_saved=2)[0]


def test_gpus() -> None:
    assert check_gpus("cuda", 8, 8) == check_gpus("auto", 0, 2) == check_gpus("cpu", 0, 2) == []
    assert "found 1 GPUs, expected 2" in check_gpus("auto", 1, 2)[0]
    assert "found 0 GPUs, expected 1" in check_gpus("cuda", 0, 1)[0]


def test_members_that_differ_are_named_with_what_they_have() -> None:
    first = {"host": "a", "problems": [], "num_nodes": 2, "ranks_per_node": 8, "configuration": "c", "torch": "2.13"}
    first |= {"omn_dist": "1", "device": "cpu"}
    assert compare_members([first, first | {"host": "b"}]) == []
    second = first | {"host": "b", "torch": "2.9", "problems": ["no disk"]}
    lines = compare_members([first, second, second])
    assert lines == [
        "b: no disk",
        "version of torch: found a 2.13, b 2.9, expected the same on all machines; start all with the same command",
    ]
    assert check_shared(Path("runs"), ["a", "b"], [True, True]) == []
    (line,) = check_shared(Path("runs"), ["a", "b", "b"], [True, False, False])
    assert "run_folder runs: b does not see what a writes there" in line


def _meet(port: int, member: int, num_members: int, seconds: float = 20) -> Meeting:
    return Meeting("127.0.0.1", port, member=member, num_members=num_members, seconds=seconds)


def test_a_meeting_gives_everybody_the_facts_of_everybody() -> None:
    port = next_free_port(23_400)
    found: dict[int, list[Any]] = {}

    def attend(member: int) -> None:
        meeting = _meet(port, member, 3)
        found[member] = [meeting.exchange({"is": member}), meeting.exchange(member * 2), sorted(meeting.leave(member, 20))]

    threads = [threading.Thread(target=attend, args=(member,)) for member in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    expected = [[{"is": 0}, {"is": 1}, {"is": 2}], [0, 2, 4], [0, 1, 2]]
    assert found == dict.fromkeys(range(3), expected)


def test_a_meeting_that_somebody_misses_names_who() -> None:
    port = next_free_port(23_500)
    meeting = _meet(port, 0, 3, seconds=0.5)
    with pytest.raises(MissingMembersError, match=r"found 1 of 3 members within 0.5 s, missing \[1, 2\]"):
        meeting.exchange("here")
    with pytest.raises(SettingsError, match=f"MASTER_PORT: found {port}, on which .* cannot listen"):
        _meet(port, 0, 3)
    nobody = next_free_port(port + 1)
    with pytest.raises(MissingMembersError, match=f"meeting at 127.0.0.1:{nobody}: member 1 of 2 .* found nobody within 1 s"):
        _meet(nobody, 1, 2, seconds=1)


@pytest.mark.parametrize(
    ("statuses", "asked", "expected"),
    [
        ([0, 0], True, 0),
        ([], False, 0),
        ([75, -15], True, 75),
        ([75, 1], False, 75),
        ([2, -15], False, 2),
        ([1, -15], True, 75),
        ([-9, 0], True, 1),
        ([1, 0], True, 1),
        ([-15, -15], False, 1),
        ([-6, 0], False, 1),
    ],
)
def test_one_status_for_many(statuses: list[int], asked: bool, expected: int) -> None:
    assert combined_status(statuses, asked_to_stop=asked) == expected


def test_a_relay_hands_a_signal_to_each_child_once_and_to_later_ones() -> None:
    program = (
        "import signal, sys, time\ncount = 0\n"
        "def count_one(number, frame):\n    global count\n    count += 1\n"
        "signal.signal(signal.SIGUSR2, count_one)\nprint('ready', flush=True)\ntime.sleep(2)\nsys.exit(10 + count)"
    )

    def child() -> "subprocess.Popen[str]":
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    with SignalRelay() as relay:
        early = child()
        signal.raise_signal(signal.SIGUSR2)
        assert relay.received == [signal.SIGUSR2]
        # The second one may be told while it starts, when the signal still ends it.
        late = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
        assert early.wait(timeout=30) == 11
        assert late.wait(timeout=30) == -signal.SIGUSR2


def test_the_command_of_a_job(tmp_path: Path) -> None:
    job = from_mapping(
        JobConfig,
        {
            "config": "configs/x.yaml",
            "overrides": ["seed=3"],
            "nodes": 4,
            "gpus_per_node": 8,
            "cpus_per_rank": 6,
            "time": "1-00:00:00",
            "partition": "long",
            "account": "physics",
            "environment": "/envs/omn",
            "container": ["apptainer", "exec", "image.sif"],
            "signal": "SIGUSR2",
            "signal_seconds": 90,
            "extra": ["--exclusive"],
        },
    )
    run = tmp_path / "run"
    command = sbatch_command(job, Path("/code"), run)
    script = command.index("/code/slurm/train.sbatch")
    assert set(command[1:script]) == {
        "--job-name=omn_dist", "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=48",
        "--time=1-00:00:00", "--partition=long", "--account=physics", "--signal=USR2@90", f"--output={run}/slurm-%j.log",
        "--open-mode=append", f"--chdir={Path.cwd()}", "--requeue", "--exclusive",
    }  # fmt: skip
    assert command[script + 1 :] == [
        "--repository=/code", "--launcher=torchrun", "--ranks-per-node=8", "--environment=/envs/omn", "--container=apptainer",
        "--container=exec", "--container=image.sif", f"{run}/config.yaml", "seed=3", f"run_folder={run}",
    ]  # fmt: skip
    by_rank = sbatch_command(dataclasses.replace(job, launcher="srun", requeue=False), Path("/code"), run)
    assert {"--ntasks-per-node=8", "--cpus-per-task=6", "--no-requeue"} <= set(by_rank)


def _submit(tmp_path: Path, text: str, *options: str) -> int:
    job = tmp_path / "job.yaml"
    job.write_text(f"config: {MICRO}\nnodes: 2\nranks_per_node: 1\noverrides: [run_folder={tmp_path / 'run'}]\n{text}")
    return main(["submit", str(job), *options])


def test_time_limits_in_all_of_slurms_forms() -> None:
    forms = {"90": 5400, "90:30": 5430, "1:02:03": 3723, "2-3": 183_600, "2-3:04": 183_840, "2-3:04:05": 183_845}
    assert {form: time_limit_seconds(form) for form in forms} == forms


def test_a_dry_run_prints_the_command_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _submit(tmp_path, "time: '20'\n", "--dry-run") == 0
    output = capsys.readouterr().out
    assert output.startswith("sbatch --job-name=omn_dist --nodes=2 --ntasks-per-node=1 --time=20 --signal=USR1@300 ")
    assert output.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time: 90\n", "time: found 90, expected str"),
        ("time: '5'\n", "time: found '5', 300 s, expected more than signal_seconds + 60 = 360"),
        ("time: soon\n", "time: found 'soon'"),
        ("time: '20'\nnodse: 3\n", "did you mean 'nodes'"),
        (
            "time: '20'\nsignal: SIGUSR2\n",
            "signal: found SIGUSR2, expected one of the run's stop_signals (SIGTERM, SIGINT, SIGUSR1)",
        ),
        ("time: '20'\ngpus_per_node: 0\ncpus_per_rank: 0\n", "cpus_per_rank: found 0"),
    ],
)
def test_a_wrong_job_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    assert _submit(tmp_path, text, "--dry-run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_without_sbatch_a_job_is_not_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _submit(tmp_path, "time: '20'\n") == 2
    assert "sbatch: not found on PATH" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_environment_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODES", "NODE_RANK", "MASTER_ADDR", "SLURM_STEP_ID", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert main(["env", str(MICRO), f"run_folder={tmp_path}"]) == 0
    output = capsys.readouterr().out
    for text in (f"torch {torch.__version__}", "gloo", "interface    lo: 127.0.0.1, up", "would use    1 machines with 1 ranks"):
        assert text in output
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    assert main(["env", str(MICRO), f"run_folder={tmp_path}"]) == 2
    assert "GLOO_SOCKET_IFNAME: found no interface 'no_such_interface'" in capsys.readouterr().err


def test_throughput_leaves_the_first_steps_out_and_counts_a_rank(tmp_path: Path) -> None:
    for name, hosts, rates in (("one", ["a"], [1.0, 100.0, 100.0, 100.0]), ("two", ["a", "b"], [1.0, 150.0, 150.0, 150.0])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(json.dumps({"ranks": [{"host": host} for host in hosts]}))
        rows = [{"kind": "train", "tokens_per_second": rate} for rate in rates]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, one, two = (line.split() for line in throughput_table([tmp_path / "one", tmp_path / "two"]))
    assert one == ["1", "1", "100", "100", "-", "100", "100.0%"]
    assert two == ["2", "2", "150", "150", "-", "150", "75.0%"]
