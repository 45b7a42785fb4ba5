"""What is wrong with MASTER_ADDR, MASTER_PORT and the numbers of ranks is known before anybody waits."""

import contextlib
import datetime
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from omn_dist.cli import main
from omn_dist.launch.job_layout import read_layout
from omn_dist.launch.network import next_free_port
from omn_dist.settings import SettingsError
from omn_dist.train.meeting_point import (
    MeetingPointError,
    MissingMembersError,
    check_route,
    is_own,
    leads_here,
    open_store,
    parse_port,
)
from omn_dist.train.ranks import Ranks, meeting_point, rank_numbers

MICRO = Path(__file__).parents[1] / "micro.yaml"
ELSEWHERE = "203.0.113.7"
"""An address for documentation (RFC 5737), which no machine has."""


def _environment(rank: str = "0", local_rank: str = "0", world_size: str = "2", **others: str) -> dict[str, str]:
    return {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, **others}


def test_numbers_of_ranks() -> None:
    assert rank_numbers({}) == (0, 0, 1)
    assert rank_numbers({"SLURM_STEP_NUM_TASKS": "1"}) == (0, 0, 1)
    assert rank_numbers(_environment("3", "1", "4", LOCAL_WORLD_SIZE="2")) == (3, 1, 4)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "found RANK, WORLD_SIZE only"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "RANK: not set, but SLURM_STEP_NUM_TASKS is 2"),
        (_environment(rank=""), "RANK: found '', expected a whole number"),
        (_environment(world_size="two"), "WORLD_SIZE: found 'two'"),
        (_environment(rank="-1"), "RANK: found '-1'"),
        (_environment(rank="2"), "RANK: found 2 with WORLD_SIZE=2"),
        (_environment(world_size="0"), "RANK: found 0 with WORLD_SIZE=0"),
        (_environment(local_rank="2"), "LOCAL_RANK: found 2 with WORLD_SIZE=2"),
        (_environment(local_rank="1", LOCAL_WORLD_SIZE="1"), "LOCAL_RANK: found 1 with LOCAL_WORLD_SIZE=1"),
        (_environment(LOCAL_WORLD_SIZE="4"), "LOCAL_WORLD_SIZE: found 4 with WORLD_SIZE=2"),
    ],
)
def test_numbers_of_ranks_that_contradict_each_other(environment: dict[str, str], message: str) -> None:
    with pytest.raises(MeetingPointError, match=message):
        rank_numbers(environment)


@pytest.mark.parametrize("text", ["", "0", "65536", "99999999", "x", "-1", "29400.0", "²"])
def test_a_port_that_is_none(text: str) -> None:
    assert parse_port("29400") == 29_400
    with pytest.raises(MeetingPointError, match=r"MASTER_PORT: found .*, expected a port from 1 to 65535"):
        parse_port(text)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NODE_RANK": "0"}, "NODES: not set, but NODE_RANK is '0'"),
        ({"NODES": ""}, "NODES: found ''"),
        ({"NODES": "2", "NODE_RANK": "", "MASTER_ADDR": "10.0.0.1"}, "NODE_RANK: found ''"),
        ({"NNODES": "2"}, "NNODES: found '2', but NODES is 1"),
        ({"NODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1", "PET_NNODES": "4"}, "PET_NNODES: found '4', but NODES is 2"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE: found '2', set by another launcher"),
        ({"MASTER_PORT": ""}, "MASTER_PORT: found ''"),
        ({"MASTER_PORT": "65535"}, "expected a port from 1 to 65534"),
    ],
)
def test_machines_by_hand_that_contradict_each_other(environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_layout(environment, 1)


def _point(rank: int, local_rank: int, **environment: str) -> tuple[str, int, bool]:
    ranks = Ranks(rank=rank, local_rank=local_rank, world_size=4, device=torch.device("cpu"))
    return meeting_point(ranks, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"} | environment)


def test_where_ranks_meet() -> None:
    assert _point(0, 0) == ("127.0.0.1", 29_400, True)
    assert _point(3, 3) == ("127.0.0.1", 29_400, False)
    # torchrun's agent serves the store, on whatever machine it is.
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert _point(0, 0, MASTER_ADDR=ELSEWHERE, **agent) == (ELSEWHERE, 29_400, False)


@pytest.mark.parametrize(
    ("rank", "local_rank", "environment", "message"),
    [
        (0, 0, {"MASTER_ADDR": ""}, "MASTER_ADDR: not set or empty"),
        (0, 0, {"MASTER_PORT": "http"}, "MASTER_PORT: found 'http'"),
        (1, 1, {"MASTER_ADDR": "no.such.host.invalid"}, "'no.such.host.invalid' resolves to no address"),
        (0, 0, {"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "2"}, "leads to the first of 2 machines"),
        (2, 0, {"LOCAL_WORLD_SIZE": "2"}, "'127.0.0.1' is 127.0.0.1 here"),
        (0, 0, {"MASTER_ADDR": ELSEWHERE}, f"is {ELSEWHERE}, which is no address of"),
    ],
)
def test_a_meeting_point_that_cannot_be_is_refused_at_once(
    rank: int, local_rank: int, environment: dict[str, str], message: str
) -> None:
    started = time.monotonic()
    with pytest.raises(MeetingPointError) as error:
        _point(rank, local_rank, **environment)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert time.monotonic() - started < 8


def test_addresses_of_this_machine_and_ways_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_own("127.0.0.1")
    assert not is_own(ELSEWHERE)
    port = next_free_port(23_600)
    assert leads_here("127.0.0.1", port)
    assert not leads_here(ELSEWHERE, port)
    # Behind a forwarded port, an address that the machine does not have leads to it.
    monkeypatch.setattr("omn_dist.train.meeting_point.leads_here", lambda address, port: True)
    assert check_route("a", [ELSEWHERE], port, is_first=True) == []
    assert check_route("a", ["127.0.0.1"], port, is_first=False) == []
    monkeypatch.setattr("omn_dist.train.meeting_point.source_address", lambda address: None)
    (line,) = check_route("a", [ELSEWHERE], port, is_first=False)
    assert f"'a' is {ELSEWHERE}, to which this machine has no route" in line


@pytest.mark.parametrize("greets", [False, True])
def test_another_program_at_the_port_ends_the_wait_in_time_and_silently(capfd: pytest.CaptureFixture[str], greets: bool) -> None:
    def greet() -> None:
        with contextlib.suppress(OSError):
            while True:
                server.accept()[0].sendall(b"SSH-2.0 hello\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if greets:
            threading.Thread(target=greet, daemon=True).start()
        started = time.monotonic()
        with pytest.raises(MissingMembersError, match=f"what listens at 127.0.0.1:{port} is another program"):
            open_store("127.0.0.1", port, serve=False, deadline=started + 2, timeout=datetime.timedelta(seconds=1))
        assert time.monotonic() - started < 10
        assert capfd.readouterr().err == ""
    # torch goes on trying until its own time-out, and logs it, while this process lives.
    for thread in threading.enumerate():
        if "connect" in thread.name:
            thread.join(timeout=20)


def test_a_wrong_meeting_point_is_one_line_of_every_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, which else prints for all, may not know of it."""
    for name, value in _environment("1", "0", "2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29400").items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(MICRO)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("omn-dist: rank 1 on ")
    assert "MASTER_ADDR: 'localhost' is " in line
