"""The order of a step: what is in flight while a wave is orthogonalised, and that memory is allocated once."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from omn_dist import plan_ownership
from omn_dist.exchange import pipeline as module
from omn_dist.exchange.pipeline import Pipeline, Place
from omn_dist.exchange.transport import Pending, Traffic


class _Recorder(Pending):
    def __init__(self, events: list[str], name: str) -> None:
        super().__init__()
        self._events, self._name = events, name
        events.append(f"launch {name}")

    def wait(self) -> None:
        self._events.append(f"wait {self._name}")


class _Transport:
    def __init__(self, events: list[str]) -> None:
        self.traffic, self._events = Traffic(), events

    def gather(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        return _Recorder(self._events, f"gather {number}")

    def scatter(self, number: int, sent: Tensor, received: Tensor) -> Pending:
        return _Recorder(self._events, f"scatter {number}")


class _Work:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def has_gradient(self, matrix: int) -> bool:
        return True

    def prepare(self, places: Sequence[Place], *rest: Any, commit: bool) -> None:
        assert commit
        self._events.append("prepare")

    def transform(self, matrices: Sequence[int], *rest: Any) -> None:
        self._events.append("transform")

    def apply(self, places: Sequence[Place], *rest: Any) -> None:
        self._events.append("apply")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(module, "make_transport", lambda *arguments: _Transport(found))
    return found


def _pipeline(num_matrices: int) -> Pipeline:
    shapes = {f"m{index:02}": (8, 8) for index in range(num_matrices)}
    plan = plan_ownership(shapes, 2, wave_bytes=300)
    return Pipeline(plan, 0, None, torch.device("cpu"), torch.float32)


def test_neighbouring_waves_are_in_flight_while_one_is_orthogonalised(events: list[str]) -> None:
    pipeline = _pipeline(8)
    num_waves = len(pipeline.plan.waves)
    assert num_waves == 4
    pipeline.run(_Work(events), lambda: events.append("adamw"))
    in_flight: set[str] = set()
    number = 0
    for event in events:
        kind, _, name = event.partition(" ")
        if kind == "launch":
            in_flight.add(name)
        elif kind == "wait":
            in_flight.remove(name)
        elif event == "adamw":
            assert in_flight == {"gather 0"}
        elif event == "transform":
            expected = {f"gather {number + 1}"} if number + 1 < num_waves else set()
            expected |= {f"scatter {number - 1}"} if number else set()
            assert in_flight == expected
            number += 1
    assert number == num_waves
    assert not in_flight


def test_a_step_allocates_no_new_buffers_and_they_do_not_grow_with_depth(events: list[str]) -> None:
    sizes = {depth: _pipeline(depth).temporary_bytes for depth in (8, 32, 128)}
    assert len(set(sizes.values())) == 1
    pipeline = _pipeline(8)
    assert pipeline.temporary_bytes == pipeline.plan.temporary_bytes
    before = pipeline.temporary_bytes
    pipeline.run(_Work(events), lambda: None)
    assert pipeline.temporary_bytes == before
