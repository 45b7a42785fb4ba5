"""torchrun on two hosts with their own networks: training, stopping, and wrong starts."""

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from cluster import TIMEOUT, until
from hosts import INTERFACE, Host
from launching import STEPS, launch_command, nodes_environment
from runs import assert_bitwise, comparable

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


def start(
    hosts: Sequence[Host], run_folder: Path, *options: str, only: Host | None = None, **variables: str
) -> "list[subprocess.Popen[str]]":
    """The same command on every host, or on one of them."""
    return [
        host.start(
            *launch_command(run_folder, *options),
            env=nodes_environment(host, hosts) | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for host in hosts
        if only in (None, host)
    ]


def finish(processes: "list[subprocess.Popen[str]]") -> tuple[list[int], str]:
    """Exit statuses, and all output."""
    outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    return [process.returncode for process in processes], "\n".join(outputs)


def test_two_hosts_train_one_model(uninterrupted: Path) -> None:
    record = json.loads((uninterrupted / "record.json").read_text())
    assert [rank["host"] for rank in record["ranks"]] == ["n0", "n1"]
    losses = [row["loss"] for row in comparable(uninterrupted) if row["kind"] == "validation"]
    assert losses[-1] < losses[0] - 0.5
    assert record["result"]["steps"] == STEPS


def test_a_signal_to_one_host_stops_both_with_a_checkpoint_and_the_rest_is_bitwise(
    hosts: Sequence[Host], tmp_path: Path, uninterrupted: Path
) -> None:
    folder, metrics, pace = tmp_path / "run", tmp_path / "run" / "metrics.jsonl", tmp_path / "pace"
    pace.write_text("0.2")
    slow = {"SLOW_STEPS": str(pace), "PYTHONPATH": f"{Path(__file__).parent / 'slow'}:{Path(__file__).parents[2]}"}
    logs = tmp_path / "logs"
    # A signal that stops only where it was chosen.
    processes = start(hosts, folder, "stop_signals=[SIGUSR2]", "--rendezvous", "c10d", "--log-folder", str(logs), **slow)
    until(
        lambda: (metrics.exists() and metrics.read_text().count('"kind": "train"') >= 3) or processes[0].poll() is not None,
        lambda: f"no step was taken: {finish(processes)}",
    )
    # setpriv and nsenter have become the launcher itself by now.
    processes[1].send_signal(signal.SIGUSR2)
    statuses, output = finish(processes)
    assert statuses == [75, 75], output
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert f"saved step {int(checkpoint.name.removeprefix('step_'))} of {STEPS}" in output
    assert {path.name for path in logs.iterdir()} >= {f"rank_{rank}.{kind}" for rank in range(2) for kind in ("out", "err")}
    for host in hosts:
        until(lambda host=host: not _ranks(host), lambda host=host: f"still there: {_ranks(host)}", 10)

    statuses, output = finish(start(hosts, folder))
    assert statuses == [0, 0], output
    assert_bitwise(folder, uninterrupted, STEPS)
    assert comparable(folder) == comparable(uninterrupted)


def _ranks(host: Host) -> list[str]:
    """Commands of the ranks and launchers on a host."""
    commands = []
    for number in host.processes():
        try:
            command = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "omn_dist" in command:
            commands.append(command)
    return commands


def test_machines_that_were_started_differently_refuse_together(hosts: Sequence[Host], tmp_path: Path) -> None:
    """Another configuration and another number of ranks: no machine starts, and all say why."""
    options = ([], ["batch.max_consecutive_rejected=5", "--ranks-per-node", "2"])
    processes = [start(hosts, tmp_path / "run", *extra, only=host)[0] for host, extra in zip(hosts, options, strict=True)]
    statuses, output = finish(processes)
    assert statuses == [2, 2], output
    assert output.count("ranks per node: found n0 1, n1 2, expected the same on all machines") == 2
    assert output.count("configuration (SHA-256): found n0") == 2
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: not set, but the run has 2 machines"),
        ({"MASTER_ADDR": "n0"}, "MASTER_ADDR: 'n0' is 127.0.1.1 here"),
        (
            {"GLOO_SOCKET_IFNAME": "ib0"},
            f"GLOO_SOCKET_IFNAME: found no interface 'ib0', expected one of: lo 127.0.0.1, {INTERFACE}",
        ),
    ],
)
def test_a_wrong_variable_is_one_line(hosts: Sequence[Host], tmp_path: Path, variables: dict[str, str], message: str) -> None:
    """``omn-dist env`` on the first host, which asks nobody else."""
    command = launch_command(tmp_path / "run")
    command[command.index("launch")] = "env"
    answer = subprocess.run(
        hosts[0].command(*command),
        env=nodes_environment(hosts[0], hosts) | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert answer.returncode == 2, answer.stderr
    assert [line for line in answer.stderr.splitlines() if line.startswith("omn-dist: ")] == answer.stderr.splitlines()
    assert message in answer.stderr
