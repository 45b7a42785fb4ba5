"""The CPU kernels: bit for bit torch's operations, for every stride, length and kind of number; and never needed."""

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from omn_dist import DualOptimizer
from omn_dist.algorithms import kernels, muon
from omn_dist.algorithms.adamw import adamw_update
from omn_dist.algorithms.iteration import copy_transposed
from omn_dist.algorithms.momentum import direction, next_momentum
from omn_dist.algorithms.muon import UpdateSettings
from omn_dist.algorithms.scratch import Scratch

SETTINGS = UpdateSettings(lr=0.02, weight_decay=0.1, momentum=0.95, momentum_rule="ema", nesterov=True, scale="1")
SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-45, 3e38, 1.00390625, 1.01171875)
"""Among them numbers whose rounding to bf16 is a tie."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_kernels_are_built_where_there_is_a_compiler() -> None:
    if shutil.which("cc") is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("no C compiler, or a CPU whose torch kernels fuse no multiply-adds")
    assert kernels.usable(), "reinstall the package (pip install -e .): its kernels were not built, or do not have torch's bits"


usable = pytest.mark.skipif(not kernels.usable(), reason="the kernels were not built")


def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("usable", "adamw_usable"):
        monkeypatch.setattr(kernels, name, lambda: False)


def _numbers(seed: int, *shape: int) -> Tensor:
    """Many magnitudes, with special numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator) * torch.logspace(-8, 3, shape[-1] or 1)[: shape[-1]]
    places = torch.randint(0, max(numbers.numel(), 1), (len(SPECIAL),), generator=generator)
    if numbers.numel():
        numbers.view(-1)[places] = torch.tensor(SPECIAL)
    return numbers


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal, zeros with their sign, and not a number in the same places."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(7.0, float("inf"), float("-inf")).view(torch.int16),
        other.nan_to_num(7.0, float("inf"), float("-inf")).view(torch.int16),
    )


def _by_vectors(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """An elementwise function of tensors of one shape, without the scalar tail of torch's loops.

    The tail has the same numbers but not always the same sign of zero: lerp with a weight of one multiplies by zero there with the
    other sign (:func:`test_torch_differs_from_itself_in_the_sign_of_zero_alone`).
    """
    shape, count = tensors[0].shape, tensors[0].numel()
    padded = [torch.cat([tensor.flatten(), torch.zeros(-count % 64, dtype=tensor.dtype)]) for tensor in tensors]
    return function(*padded)[:count].view(shape)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Equal, and not a number in the same places."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def _cut(whole: Tensor, left: int) -> Tensor:
    """Columns from the middle: rows with gaps between them that start anywhere."""
    return whole[1:-1, left:-3]


RECTANGLES: dict[str, st.SearchStrategy[Any]] = {
    "rows": st.integers(0, 5),
    "columns": st.integers(0, 90),
    "left": st.integers(0, 20),
    "seed": st.integers(0, 10**6),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
}


@usable
@settings(max_examples=60, deadline=None)
@example(rows=1, columns=3, left=1, seed=0, rule="ema", nesterov=False, commit=False, coefficient=0.0, dtype=torch.float32)
@given(
    **RECTANGLES,
    rule=st.sampled_from(["sum", "ema"]),
    nesterov=st.booleans(),
    commit=st.booleans(),
    coefficient=st.sampled_from([0.95, 0.9, 0.5, 0.3, 0.0]),
)
def test_directions(
    rows: int, columns: int, left: int, seed: int, rule: Any, nesterov: bool, commit: bool, coefficient: float, dtype: torch.dtype
) -> None:
    gradient, momentum = (_cut(_numbers(seed + number, rows + 2, columns + left + 3), left) for number in (0, 1))

    def next_one(gradient: Tensor, momentum: Tensor) -> Tensor:
        return next_momentum(gradient, momentum, coefficient, rule)

    def wanted(gradient: Tensor, momentum: Tensor) -> Tensor:
        return direction(gradient, next_one(gradient, momentum), coefficient, rule, nesterov).to(dtype)

    updated, expected = _by_vectors(next_one, gradient, momentum), _by_vectors(wanted, gradient, momentum)
    assert _equal(next_one(gradient, momentum), updated)
    assert _equal(wanted(gradient, momentum), expected)
    out = torch.full((rows, columns + 4), 5.0, dtype=dtype)
    before = gradient.clone(), momentum.clone()
    kernels.write_direction(out[:, :columns], gradient, momentum, coefficient, rule, nesterov, commit=commit)
    assert _same(out[:, :columns].contiguous(), expected)
    assert bool((out[:, columns:] == 5).all()), "written past the row"
    assert _same(momentum.contiguous(), updated if commit else before[1])
    assert _same(gradient.contiguous(), before[0])


@usable
def test_torch_differs_from_itself_in_the_sign_of_zero_alone() -> None:
    """What docs/numerics.md says of a momentum coefficient of zero; when it fails, ``_by_vectors`` has had its day."""
    gradient, momentum = torch.full((3,), -0.0), torch.zeros(3)
    tail = next_momentum(gradient, momentum, 0.0, "ema")
    body = _by_vectors(lambda *tensors: next_momentum(*tensors, 0.0, "ema"), gradient, momentum)
    assert torch.equal(tail, body)
    assert (tail.signbit().tolist(), body.signbit().tolist()) == ([False] * 3, [True] * 3)


@usable
@settings(max_examples=40, deadline=None)
@given(**RECTANGLES)
def test_updates(rows: int, columns: int, left: int, seed: int, dtype: torch.dtype) -> None:
    whole = _numbers(seed, rows + 2, columns + left + 3)
    update = _cut(_numbers(seed + 1, rows + 2, columns + left + 3), left).to(dtype)
    expected = whole.clone()
    _cut(expected, left).mul_(0.998).add_(update, alpha=-0.013)
    kernels.add_update(_cut(whole, left), update, 0.998, -0.013)
    assert _same(whole, expected)


@usable
@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70) | st.just(70_001), min_size=1, max_size=3),
    seed=st.integers(0, 10**6),
    weight_decay=st.sampled_from([0.0, 0.1]),
    betas=st.sampled_from([(0.9, 0.95), (0.9, 0.999), (0.4, 0.6)]),
)
def test_adamw(lengths: list[int], seed: int, weight_decay: float, betas: tuple[float, float]) -> None:
    parameters = [nn.Parameter(_numbers(seed + index, length).nan_to_num()) for index, length in enumerate(lengths)]
    reference = torch.optim.AdamW(parameters, lr=3e-3, betas=betas, weight_decay=weight_decay, foreach=False)
    ours = [parameter.detach().clone() for parameter in parameters]
    first, second = ([torch.zeros_like(tensor) for tensor in ours] for _ in range(2))
    steps = [torch.zeros(()) for _ in ours]
    for step in range(3):
        for index, parameter in enumerate(parameters):
            parameter.grad = _numbers(seed + 10 * step + index + 3, len(parameter))
        gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        reference.step()
        adamw_update(
            ours, gradients, first, second, steps, lr=3e-3, betas=betas, epsilon=1e-8, weight_decay=weight_decay, deterministic=True
        )
    for index, parameter in enumerate(parameters):
        state = reference.state[parameter]
        assert _same(ours[index], parameter.detach())
        assert _same(first[index], state["exp_avg"])
        assert _same(second[index], state["exp_avg_sq"])
        assert steps[index] == state["step"]


@usable
@pytest.mark.skipif(not kernels.adamw_usable(), reason="AdamW's kernel needs AVX-512, and a root that it knows")
def test_roots_of_all_magnitudes_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    second = torch.arange(0, 0x7F800000, 211, dtype=torch.int32).view(torch.float32)

    def stepped() -> list[Tensor]:
        tensors = [torch.ones_like(second), torch.zeros_like(second), torch.ones_like(second), second.clone()]
        lists = ([tensor] for tensor in (*tensors, torch.zeros(())))
        adamw_update(*lists, lr=1e-2, betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.1, deterministic=True)
        return tensors

    ours = stepped()
    _without_kernels(monkeypatch)
    theirs = stepped()
    assert all(map(_same, ours, theirs))


@usable
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 300), columns=st.integers(0, 300), gap=st.integers(0, 9))
def test_transposes(rows: int, columns: int, gap: int) -> None:
    whole = torch.arange(rows * (columns + gap), dtype=torch.int32).to(torch.int16).view(rows, columns + gap).view(torch.bfloat16)
    target = torch.full((columns, rows + gap), 5.0, dtype=torch.bfloat16)
    copy_transposed(target[:, :rows], whole[:, :columns])
    assert torch.equal(target[:, :rows].view(torch.int16), whole[:, :columns].mT.contiguous().view(torch.int16))
    assert bool((target[:, rows:] == 5).all()), "written past the row"


@usable
def test_every_thousandth_number_of_each_magnitude_rounds_like_torch() -> None:
    bits = torch.arange(-(2**31), 2**31, 997, dtype=torch.int64).to(torch.int32)
    numbers = bits.view(torch.float32)[None]
    out = torch.empty(numbers.shape, dtype=torch.bfloat16)
    kernels.write_direction(out, numbers, torch.full_like(numbers, -0.0), 0.0, "sum", False, commit=False)
    finite = numbers.isfinite()
    assert torch.equal(out[finite].view(torch.int16), numbers[finite].bfloat16().view(torch.int16))
    assert torch.equal(out.isnan(), numbers.isnan())


@usable
def test_what_the_kernels_do_not_take() -> None:
    good, narrow = torch.zeros(4, 6), torch.zeros(4, 6, dtype=torch.bfloat16)
    assert kernels.takes(good, good, narrow=narrow)
    assert not kernels.takes(good.T, good.T, narrow=narrow.T)
    assert not kernels.takes(narrow)
    assert not kernels.takes(good.double())
    assert not kernels.takes(good, narrow=narrow.half())
    torch.set_num_threads(2)
    assert not kernels.takes(good)
    assert not kernels.takes_transposed(narrow.T.contiguous(), narrow)


@usable
def test_tensors_that_were_changed_say_so() -> None:
    parameter, momentum = torch.zeros(2, 3), torch.zeros(2, 3)
    before = parameter._version, momentum._version
    muon.prepare(torch.ones(2, 3), momentum, SETTINGS, torch.empty(2, 3), commit=True, scratch=Scratch())
    muon.apply(parameter, torch.ones(2, 3), SETTINGS, num_rows=2, num_columns=3)
    assert parameter._version > before[0]
    assert momentum._version > before[1]


@usable
@pytest.mark.parametrize("broken", ["omn_direction", "omn_apply", "omn_transpose", "omn_adamw"])
def test_kernels_with_other_bits_are_not_used(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.library()

    class Library:
        """Its broken kernel leaves its output as it was."""

        def __getattr__(self, name: str) -> Any:
            return (lambda *arguments: None) if name == broken else getattr(real, name)

    monkeypatch.setattr(kernels, "library", Library)
    assert not (any(map(kernels._adamw_agrees, range(3))) if broken == "omn_adamw" else kernels._agree_with_torch())


@usable
@pytest.mark.parametrize("preset", ["torch", "omn", "normuon"])
def test_a_run_without_kernels_has_the_same_bits(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    for name in ("write_direction", "add_update", "adamw"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, _name=name, _kernel=kernel, **k: (used.append(_name), _kernel(*a, **k)))
    with_kernels = _trained(preset)
    assert set(used) == {"write_direction", "add_update"} | ({"adamw"} if kernels.adamw_usable() else set())
    used.clear()
    _without_kernels(monkeypatch)
    assert all(map(torch.equal, with_kernels, _trained(preset)))
    assert used == []


def test_a_package_without_its_library_goes_on_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.usable.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    try:
        assert not kernels.usable()
        muon.apply(torch.zeros(2, 3), torch.ones(2, 3), replace(SETTINGS, lr=0.1), num_rows=2, num_columns=3)
    finally:
        kernels.usable.cache_clear()


def _trained(preset: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((24, 40), (40, 24), (16, 16))]
    vectors = [nn.Parameter(torch.randn(33, generator=generator)), nn.Parameter(torch.randn((), generator=generator))]
    groups = [{"params": matrices, "algorithm": "muon"}, {"params": vectors, "algorithm": "adamw"}]
    optimizer = DualOptimizer(groups, preset=preset)  # type: ignore[arg-type]
    for _ in range(3):
        for parameter in (*matrices, *vectors):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    state = [tensor for values in optimizer.state.values() for tensor in values.values()]
    return [parameter.detach().clone() for parameter in (*matrices, *vectors)] + [tensor.clone() for tensor in state]
