"""torch's global switches of matrix products: set aside around the optimizer's, and restored."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omn_dist import DualOptimizer
from omn_dist.algorithms.newton_schulz import orthogonalize
from omn_dist.algorithms.switches import DefaultProducts

mkldnn: Any = torch.backends.mkldnn
cuda: Any = torch.backends.cuda.matmul
generic: Any = torch.backends


def _values() -> list[Any]:
    try:
        older: Any = torch.get_float32_matmul_precision(), cuda.allow_tf32
    except RuntimeError:
        older = "mixed"
    reductions = [
        getattr(cuda, f"allow_{dtype}_reduced_precision_reduction{end}") for dtype in ("bf16", "fp16") for end in ("", "_split_k")
    ]
    precisions = [generic.fp32_precision, mkldnn.matmul.fp32_precision, mkldnn.enabled, cuda.fp32_precision]
    return [*precisions, older, *reductions, cuda.allow_fp16_accumulation]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    generic.fp32_precision = mkldnn.matmul.fp32_precision = cuda.fp32_precision = "none"
    mkldnn.set_flags(_enabled=True, _fp32_precision=None)
    cuda.allow_bf16_reduced_precision_reduction = cuda.allow_fp16_reduced_precision_reduction = True
    cuda.allow_fp16_accumulation = False


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


SETTINGS: dict[str, Callable[[], None]] = {
    "float32_matmul_precision medium": lambda: torch.set_float32_matmul_precision("medium"),
    "float32_matmul_precision high": lambda: torch.set_float32_matmul_precision("high"),
    "backends.fp32_precision bf16": _set(generic, "fp32_precision", "bf16"),
    "backends.fp32_precision tf32": _set(generic, "fp32_precision", "tf32"),
    "mkldnn.matmul bf16": _set(mkldnn.matmul, "fp32_precision", "bf16"),
    "mkldnn.matmul tf32": _set(mkldnn.matmul, "fp32_precision", "tf32"),
    "mkldnn off": _set(mkldnn, "enabled", False),
    "allow_tf32": _set(cuda, "allow_tf32", True),
    "cuda tf32": _set(cuda, "fp32_precision", "tf32"),
    "no bf16 reduction": _set(cuda, "allow_bf16_reduced_precision_reduction", False),
    "no fp16 reduction": _set(cuda, "allow_fp16_reduced_precision_reduction", False),
    "no bf16 split-k": _set(cuda, "allow_bf16_reduced_precision_reduction", (False, False)),
    "fp16 accumulation": _set(cuda, "allow_fp16_accumulation", True),
}


def _products(monkeypatch: pytest.MonkeyPatch) -> DefaultProducts:
    """As in a build with CUDA, whose switches exist in every build."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return DefaultProducts()


@pytest.mark.parametrize("setting", SETTINGS)
def test_switches_are_set_aside_and_restored(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    products = _products(monkeypatch)
    _, *defaults = _values()
    SETTINGS[setting]()
    before = _values()
    assert before[1:] != defaults or setting.startswith("backends")
    with products:
        _, cpu, *inside = _values()
        with products:
            pass
        assert _values()[1:] == [cpu, *inside], "an inner one restores nothing"
    assert _values() == before
    assert cpu in ("none", "ieee")
    assert inside[0] is True
    assert inside[1] in ("none", "ieee")
    assert inside[3:] == defaults[4:]
    # A switch that followed another one does so again.
    if setting.startswith("backends"):
        generic.fp32_precision = "none"
        assert _values()[1:] == defaults


def test_switches_at_their_defaults_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    products = _products(monkeypatch)
    with products:
        pass
    monkeypatch.setattr(mkldnn.m, "set_flags", None)
    for switch in products._switches:
        assert switch.read() in switch.ours
    before = _values()
    with products:
        assert _values() == before


def test_threads_share_the_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    products = _products(monkeypatch)
    torch.set_float32_matmul_precision("medium")
    before, first_is_in, second_is_in = _values(), threading.Event(), threading.Event()
    found: list[str] = []

    def raise_inside() -> None:
        try:
            with products:
                first_is_in.set()
                second_is_in.wait(30)
                raise RuntimeError
        except RuntimeError:
            found.append("raised")

    first = threading.Thread(target=raise_inside)
    first.start()
    first_is_in.wait(30)
    with products:
        second_is_in.set()
        first.join(30)
        assert found == ["raised"]
        assert mkldnn.matmul.fp32_precision == "ieee", "the other thread left, this one is inside"
    assert _values() == before


def test_what_a_program_sets_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    products = _products(monkeypatch)
    torch.set_float32_matmul_precision("medium")
    with products:
        mkldnn.matmul.fp32_precision = "tf32"
        with products:
            assert mkldnn.matmul.fp32_precision == "ieee"
        assert mkldnn.matmul.fp32_precision == "ieee"
    assert mkldnn.matmul.fp32_precision == "tf32"


def _stepped(preset: str, fields: dict[str, Any], inside: Callable[[], AbstractContextManager[Any]] | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32)) for shape in ((144, 160), (200, 96), (33,))
    ]
    groups = [
        {"params": parameters[:2], "param_names": ["a", "b"], "algorithm": "muon", **fields},
        {"params": parameters[2:], "param_names": ["c"], "algorithm": "adamw"},
    ]
    optimizer = DualOptimizer(groups, preset=preset)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


RECIPES: list[tuple[str, dict[str, Any]]] = [
    ("omn", {}),
    ("omn", {"form": "gram"}),
    ("omn", {"spectral_cap": 0.5}),
    ("torch", {}),
    ("normuon", {}),
]


@pytest.mark.parametrize("setting", list(SETTINGS)[:8])
@pytest.mark.parametrize(("preset", "fields"), RECIPES)
def test_a_step_has_the_same_bits(setting: str, preset: str, fields: dict[str, Any]) -> None:
    expected = _stepped(preset, fields)
    SETTINGS[setting]()
    found = _stepped(preset, fields)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_orthogonalize_has_the_same_bits() -> None:
    direction = torch.randn(144, 160, generator=torch.Generator().manual_seed(0))
    expected = orthogonalize(direction)
    torch.set_float32_matmul_precision("medium")
    product = direction @ direction.mT
    assert torch.equal(expected, orthogonalize(direction))
    assert torch.equal(product, direction @ direction.mT), "the program's own products are as before"


def test_switches_at_their_defaults_cost_microseconds() -> None:
    products = DefaultProducts()
    with products:
        pass
    fastest = 1.0
    for _ in range(20):
        start = time.process_time()
        for _ in range(100):
            with products:
                pass
        fastest = min(fastest, (time.process_time() - start) / 100)
    assert fastest < 100e-6
