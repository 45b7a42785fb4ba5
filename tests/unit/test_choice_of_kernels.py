"""Which kernels run: chosen when an optimizer is built, and logged with the reason."""

import ctypes
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from omn_dist import DualOptimizer
from omn_dist.kernels import TORCH, choose, choose_kernels
from omn_dist.kernels.cpu import kernels as cpu
from omn_dist.kernels.cpu.kernels import CpuKernels, build_cpu_kernels
from omn_dist.kernels.cpu.library import NoKernelsError, load_library
from omn_dist.kernels.cpu.samples import COMPARISONS
from omn_dist.settings import SettingsError

SCRIPT = Path(__file__).with_name("steps_in_a_process.py")
SHAPES = [(130, 200), (200, 130)]


def _is_usable() -> bool:
    try:
        load_library()
    except NoKernelsError:
        return False
    return True


usable = pytest.mark.skipif(not _is_usable(), reason="the kernels were not built")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """One thread, and nothing chosen yet."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    _forget()
    yield
    torch.set_num_threads(before)
    _forget()


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged about kernels; plans are logged too where a test before set that level."""
    return [record.message for record in caplog.records if record.name == "omn_dist.kernels"]


def _forget() -> None:
    choose._cpu.cache_clear()
    choose._torch.cache_clear()


def _steps(**variables: str) -> tuple[str, str]:
    """The hash of weights and state after steps in a process, and what it logged of its kernels."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMN_DIST_")}
    answer = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**environment, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    (line,) = (line for line in answer.stderr.splitlines() if line.startswith("omn_dist.kernels INFO"))
    return answer.stdout.strip(), line


@usable
def test_bits_and_log_do_and_do_not_depend_on_the_kernels() -> None:
    hashed, line = _steps()
    assert "kernels: C for avx" in line
    variants = {
        "kernels: torch (the CPU lacks AVX2 and FMA, as OMN_DIST_CPU_FLAGS='' has it)": {"OMN_DIST_CPU_FLAGS": ""},
        "kernels: C for avx2 (directions, updates, AdamW, transposes, with torch's bits on samples)": {
            "OMN_DIST_CPU_FLAGS": "avx2"
        },
        "kernels: torch (OMN_DIST_KERNELS=torch)": {"OMN_DIST_KERNELS": "torch"},
        "kernels: torch (torch's own kernels are of CPU capability DEFAULT and fuse no multiply-adds)": {
            "ATEN_CPU_CAPABILITY": "default"
        },
    }
    for message, variables in variants.items():
        found, line = _steps(**variables)
        assert line.endswith(message), line
        if "ATEN_CPU_CAPABILITY" not in variables:
            assert found == hashed, message


@usable
def test_the_choice_is_made_once_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "omn_dist.kernels"):
        first = choose_kernels()
        assert choose_kernels() is first
        assert choose_kernels("torch") is TORCH
        assert choose_kernels("torch") is TORCH
    assert isinstance(first, CpuKernels)
    assert first.fuses_adamw
    assert _lines(caplog) == [f"kernels: {first}", "kernels: torch (kernels='torch')"]


def test_the_variable_beats_the_program(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OMN_DIST_KERNELS", "torch")
    with caplog.at_level(logging.INFO, "omn_dist.kernels"):
        assert choose_kernels("auto") is TORCH
    assert _lines(caplog)[-1] == "kernels: torch (OMN_DIST_KERNELS=torch)"
    monkeypatch.setenv("OMN_DIST_KERNELS", "auto")
    assert choose_kernels("torch") is choose_kernels("auto")
    monkeypatch.setenv("OMN_DIST_KERNELS", "troch")
    with pytest.raises(SettingsError, match=r"OMN_DIST_KERNELS=troch.*did you mean 'torch'"):
        choose_kernels()
    monkeypatch.delenv("OMN_DIST_KERNELS")
    with pytest.raises(SettingsError, match="did you mean 'auto'"):
        choose_kernels("auot")  # type: ignore[arg-type]


@usable
def test_unknown_flags_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMN_DIST_CPU_FLAGS", "avx2,avx51")
    with pytest.raises(SettingsError, match=r"OMN_DIST_CPU_FLAGS 'avx51'; did you mean 'avx512'"):
        choose_kernels()


def test_several_threads_run_torch(caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(2)
    with caplog.at_level(logging.INFO, "omn_dist.kernels"):
        assert choose_kernels() is TORCH
    assert _lines(caplog)[-1] == "kernels: torch (found 2 threads, the C kernels have one)"


def test_a_package_without_its_library_goes_on_with_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, "omn_dist.kernels"):
        assert choose_kernels() is TORCH
        _trained_step()
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert "the library was not built" in _lines(caplog)[-1]


@usable
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda path: object())
    with caplog.at_level(logging.INFO, "omn_dist.kernels"):
        assert choose_kernels() is TORCH
    assert "not that of this version, reinstall the package" in _lines(caplog)[-1]


@usable
def test_kernels_whose_samples_all_differ_are_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cpu, "COMPARISONS", dict.fromkeys(COMPARISONS, lambda kernels: False))
    with caplog.at_level(logging.INFO, "omn_dist.kernels"):
        assert choose_kernels() is TORCH
    assert _lines(caplog)[-1] == "kernels: torch (all samples differed from torch's)"


def _trained_step() -> None:
    weight = nn.Parameter(torch.ones(4, 6))
    weight.grad = torch.ones(4, 6)
    DualOptimizer([{"params": [weight], "algorithm": "muon"}], preset="omn").step()


@usable
def test_the_first_step_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples and shapes are tried when the optimizer is built."""
    weight = nn.Parameter(torch.ones(130, 200))
    tried: list[str] = []
    counted = {name: lambda kernels, _name=name: bool(tried.append(_name)) or COMPARISONS[_name](kernels) for name in COMPARISONS}
    monkeypatch.setattr(cpu, "COMPARISONS", counted)
    optimizer = DualOptimizer([{"params": [weight], "algorithm": "muon"}], preset="torch")
    assert tried == list(COMPARISONS)
    monkeypatch.setattr(cpu, "in_own_thread", lambda call: pytest.fail("a trial in a step"))
    monkeypatch.setattr("omn_dist.kernels.cpu.products.in_own_thread", lambda call: pytest.fail("a trial in a step"))
    weight.grad = torch.ones(130, 200)
    optimizer.step()


class _DefaultDtype(AbstractContextManager[None]):
    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self._before)


MODES: dict[str, Any] = {
    "none": nullcontext,
    "default dtype": _DefaultDtype,
    "default device": lambda: torch.device("meta"),
    "fake tensors": FakeTensorMode,
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@usable
@pytest.mark.parametrize("mode", MODES)
def test_trials_do_not_depend_on_modes_of_the_caller(mode: str) -> None:
    reference = build_cpu_kernels()
    reference.warm_up(SHAPES, torch.bfloat16)
    with MODES[mode]():
        found = build_cpu_kernels()
        found.warm_up(SHAPES, torch.bfloat16)
    assert str(found) == str(reference)
    assert found._operations == COMPARISONS.keys()
    if reference._products is None:
        return
    assert found._products is not None
    taken = [
        {key: chunks and bytes(chunks) for key, chunks in kernels._products._chunks.items()}  # type: ignore[union-attr]
        for kernels in (found, reference)
    ]
    assert taken[0] == taken[1]
    assert None not in taken[0].values()


@usable
def test_trials_change_nothing_that_another_thread_sees() -> None:
    """The default dtype belongs to all threads, and another one may set it meanwhile."""
    seen = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.add((torch.get_default_dtype(), torch.ones(1).dtype, torch.ones(1).device))

    watcher = threading.Thread(target=watch)
    with _DefaultDtype():
        watcher.start()
        for _ in range(5):
            build_cpu_kernels().warm_up(SHAPES, torch.bfloat16)
        done.set()
        watcher.join()
    assert seen == {(torch.bfloat16, torch.bfloat16, torch.device("cpu"))}
