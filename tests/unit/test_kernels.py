"""The C kernels: bit for bit torch's operations, for every stride and number; and never needed."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import LIBRARIES, numbers, same, usable, variants
from one_by_one import direction, next_momentum
from torch import Tensor, nn

from omn_dist import DualOptimizer
from omn_dist.algorithms.adamw import AdamWCoefficients, AdamWShards
from omn_dist.kernels import TORCH, Kernels
from omn_dist.kernels.cpu.elementwise import Elementwise
from omn_dist.kernels.cpu.kernels import CpuKernels, agreeing, build_cpu_kernels
from omn_dist.kernels.cpu.library import load_library
from omn_dist.kernels.cpu.samples import COMPARISONS


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernels() -> CpuKernels:
    return build_cpu_kernels()


def test_kernels_are_built_where_there_is_a_compiler() -> None:
    if shutil.which("cc") is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("no C compiler, or a CPU whose torch kernels fuse no multiply-adds")
    assert LIBRARIES, "reinstall the package (pip install -e .): its kernels were not built"
    for library in LIBRARIES.values():
        assert agreeing(library) == COMPARISONS.keys(), "its kernels do not have torch's bits"


def _by_vectors(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """An elementwise function of tensors of one shape, without the scalar tail of torch's loops.

    The tail has the same numbers, but not always the same sign of zero: lerp with a weight of one
    multiplies by zero there with the other sign
    (:func:`test_torch_differs_from_itself_in_the_sign_of_zero_alone`).
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


@variants
@settings(max_examples=60, deadline=None)
@example(rows=1, columns=3, left=1, seed=0, rule="ema", nesterov=False, commit=False, coefficient=0.0, dtype=torch.float32)
@given(
    **RECTANGLES,
    rule=st.sampled_from(["sum", "ema"]),
    nesterov=st.booleans(),
    commit=st.booleans(),
    coefficient=st.sampled_from([0.95, 0.9, 0.5, 0.3, 0.0, 1.0]),
)
def test_directions(
    variant: str,
    rows: int,
    columns: int,
    left: int,
    seed: int,
    rule: Any,
    nesterov: bool,
    commit: bool,
    coefficient: float,
    dtype: torch.dtype,
) -> None:
    gradient, momentum = (_cut(numbers(seed + number, rows + 2, columns + left + 3), left) for number in (0, 1))

    def next_one(gradient: Tensor, momentum: Tensor) -> Tensor:
        return next_momentum(gradient, momentum, coefficient, rule)

    def wanted(gradient: Tensor, momentum: Tensor) -> Tensor:
        return direction(gradient, next_one(gradient, momentum), coefficient, rule, nesterov).to(dtype)

    updated, expected = _by_vectors(next_one, gradient, momentum), _by_vectors(wanted, gradient, momentum)
    assert _equal(next_one(gradient, momentum), updated)
    assert _equal(wanted(gradient, momentum), expected)
    out = torch.full((rows, columns + 4), 5.0, dtype=dtype)
    before = gradient.clone(), momentum.clone()
    elementwise = Elementwise(LIBRARIES[variant])
    assert elementwise.write_direction(gradient, momentum, out[:, :columns], coefficient, rule, nesterov, commit=commit)
    assert same(out[:, :columns].contiguous(), expected)
    assert bool((out[:, columns:] == 5).all()), "written past the row"
    assert same(momentum.contiguous(), updated if commit else before[1])
    assert same(gradient.contiguous(), before[0])


def test_torch_differs_from_itself_in_the_sign_of_zero_alone() -> None:
    """As docs/numerics.md says. When this fails, ``_by_vectors`` is not needed any more."""
    gradient, momentum = torch.full((3,), -0.0), torch.zeros(3)
    tail = next_momentum(gradient, momentum, 0.0, "ema")
    body = _by_vectors(lambda *tensors: next_momentum(*tensors, 0.0, "ema"), gradient, momentum)
    assert torch.equal(tail, body)
    assert (tail.signbit().tolist(), body.signbit().tolist()) == ([False] * 3, [True] * 3)


@variants
@settings(max_examples=40, deadline=None)
@given(**RECTANGLES)
def test_updates(variant: str, rows: int, columns: int, left: int, seed: int, dtype: torch.dtype) -> None:
    whole = numbers(seed, rows + 2, columns + left + 3)
    update = _cut(numbers(seed + 1, rows + 2, columns + left + 3), left).to(dtype)
    expected = whole.clone()
    _cut(expected, left).mul_(0.998).add_(update, alpha=-0.013)
    assert Elementwise(LIBRARIES[variant]).add_update(_cut(whole, left), update, 0.998, 0.013)
    assert same(whole, expected)


@variants
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 300), columns=st.integers(0, 300), gap=st.integers(0, 9))
def test_transposes(variant: str, rows: int, columns: int, gap: int) -> None:
    whole = torch.arange(rows * (columns + gap), dtype=torch.int32).to(torch.int16).view(rows, columns + gap).view(torch.bfloat16)
    target = torch.full((columns, rows + gap), 5.0, dtype=torch.bfloat16)
    assert Elementwise(LIBRARIES[variant]).transpose(target[:, :rows], whole[:, :columns])
    assert torch.equal(target[:, :rows].view(torch.int16), whole[:, :columns].mT.contiguous().view(torch.int16))
    assert bool((target[:, rows:] == 5).all()), "written past the row"


@variants
def test_every_thousandth_number_of_each_magnitude_rounds_like_torch(variant: str) -> None:
    bits = torch.arange(-(2**31), 2**31, 997, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)[None]
    out = torch.empty(values.shape, dtype=torch.bfloat16)
    elementwise, zeros = Elementwise(LIBRARIES[variant]), torch.full_like(values, -0.0)
    assert elementwise.write_direction(values, zeros, out, 0.0, "sum", False, commit=False)
    finite = values.isfinite()
    assert torch.equal(out[finite].view(torch.int16), values[finite].bfloat16().view(torch.int16))
    assert torch.equal(out.isnan(), values.isnan())


def _directed(kernels: Kernels | Elementwise, gradient: Tensor, momentum: Tensor, out: Tensor) -> bool:
    if isinstance(kernels, Elementwise):
        return kernels.write_direction(gradient, momentum, out, 0.95, "ema", True, commit=True)
    kernels.write_directions([gradient], [momentum], [out], 0.95, "ema", True, commit=True)
    return True


@usable
def test_what_the_kernels_do_not_take(kernels: CpuKernels) -> None:
    elementwise = Elementwise(load_library())

    def good() -> Tensor:
        return torch.ones(4, 6)

    def narrow() -> Tensor:
        return torch.ones(4, 6, dtype=torch.bfloat16)

    def freed() -> Tensor:
        tensor = good()
        tensor.untyped_storage().resize_(0)
        return tensor

    def shortened() -> Tensor:
        tensor = good()
        tensor.untyped_storage().resize_(4 * 23)
        return tensor

    same, square = good(), narrow()[:, :4].contiguous()
    assert _directed(elementwise, good(), good(), narrow())
    assert elementwise.add_update(good(), narrow(), 1.0, 0.1)
    for gradient, momentum, out in (
        (good().T, good().T, narrow().T),
        (narrow(), good(), narrow()),
        (good(), narrow(), narrow()),
        (good().double(), good(), narrow()),
        (good(), good(), narrow().half()),
        (good(), good(), good()[:, :5]),
        (good()[:3], good(), good()),
        (torch.ones(6).expand(4, 6), good(), good()),
        (good(), torch.ones(6).expand(4, 6), good()),
        (good().view(2, 2, 6), good().view(2, 2, 6), good().view(2, 2, 6)),
        (good().to_sparse(), good(), good()),
        (good().to("meta"), good(), good()),
        (nn.Parameter(good()), good(), good()),
        (freed(), good(), good()),
        (good(), good(), shortened()),
        (same, same, good()),
    ):
        before = momentum.clone() if momentum.untyped_storage().nbytes() else momentum
        assert not _directed(elementwise, gradient, momentum, out)
        assert torch.equal(momentum, before)
    for parameter, update in (
        (narrow(), narrow()),
        (good().T, good().T),
        (good(), good().double()),
        (same, same),
        (good(), freed()),
    ):
        assert not elementwise.add_update(parameter, update, 1.0, 0.1)
    for target, source in (
        (narrow(), narrow()),
        (good().T.contiguous(), good()),
        (narrow().T, narrow()),
        (narrow().T.contiguous().half(), narrow()),
        (narrow().T.contiguous()[None], narrow()[None]),
        (square, square),
    ):
        assert not elementwise.transpose(target, source)
    # All of them arrive all the same.
    assert torch.equal(kernels.copy_transposed(torch.zeros(6, 4).half(), narrow()), torch.ones(6, 4).half())
    assert torch.equal(kernels.copy_transposed(torch.zeros(2, 6, 4), good().expand(2, 4, 6)), torch.ones(2, 6, 4))


@usable
def test_several_threads_are_left_to_torch(kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    used = _spied(monkeypatch)
    narrow = torch.zeros(4, 6, dtype=torch.bfloat16)

    def call_all() -> None:
        _directed(kernels, torch.ones(4, 6), torch.zeros(4, 6), torch.zeros(4, 6))
        kernels.apply_updates([torch.ones(4, 6)], [narrow], 0.9, 0.1, cautious=False)
        kernels.copy_transposed(narrow.T.contiguous(), narrow)
        shards = AdamWShards(*([torch.ones(3)] for _ in range(4)), [torch.zeros(())])
        kernels.adamw(shards, AdamWCoefficients(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0), batch_invariant=True)

    call_all()
    assert set(used) == {"write_direction", "add_update", "transpose", "adamw"}
    used.clear()
    torch.set_num_threads(2)
    call_all()
    assert used == []


def _spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the methods in C that are called from now on."""
    used: list[str] = []
    for name in ("write_direction", "add_update", "transpose", "adamw"):
        method = getattr(Elementwise, name)
        spy = lambda *a, _name=name, _method=method, **k: (used.append(_name), _method(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(Elementwise, name, spy)
    return used


@usable
def test_a_lazy_sign_is_seen(kernels: CpuKernels) -> None:
    """The imaginary part of a conjugate is a view whose memory has the other sign."""
    gradient = -torch.arange(24.0).view(4, 6)
    lazy = torch.complex(torch.zeros(4, 6), torch.arange(24.0).view(4, 6)).conj().imag
    assert lazy.is_neg()
    assert torch.equal(lazy, gradient)
    dense = torch._neg_view(torch.arange(24.0).view(4, 6))
    assert dense.is_contiguous()
    for signed in (lazy, dense):
        momentum, out, expected = torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(4, 6)
        _directed(kernels, signed, momentum, out)
        _directed(TORCH, gradient, torch.zeros(4, 6), expected)
        assert torch.equal(out, expected)
        ours, theirs = (
            AdamWShards(*([tensor] for tensor in (torch.ones(4, 6), of, torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(()))))
            for of in (signed, gradient)
        )
        for one, shards in ((kernels, ours), (TORCH, theirs)):
            one.adamw(shards, AdamWCoefficients(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1), batch_invariant=True)
        assert torch.equal(ours.parameters[0], theirs.parameters[0])


@usable
def test_tensors_that_were_changed_say_so(kernels: CpuKernels) -> None:
    parameter, momentum, out = (torch.zeros(2, 3) for _ in range(3))
    before = [tensor._version for tensor in (parameter, momentum, out)]
    _directed(kernels, torch.ones(2, 3), momentum, out)
    kernels.apply_updates([parameter], [torch.ones(2, 3)], 0.9, 0.1, cautious=False)
    assert all(tensor._version > old for tensor, old in zip((parameter, momentum, out), before, strict=True))
    shards = AdamWShards(*([torch.ones(3)] for _ in range(4)), [torch.zeros(())])
    before = [tensors[0]._version for tensors in shards]
    kernels.adamw(shards, AdamWCoefficients(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0), batch_invariant=True)
    changed = [tensors[0]._version > old for tensors, old in zip(shards, before, strict=True)]
    assert changed == [True, False, True, True, True]


@variants
@pytest.mark.parametrize(
    ("broken", "operation"),
    [
        ("direction", "directions"),
        ("apply", "updates"),
        ("transpose", "transposes"),
        ("adamw_moments", "AdamW"),
        ("adamw_update", "AdamW"),
    ],
)
def test_kernels_with_other_bits_are_not_used(variant: str, broken: str, operation: str) -> None:
    """A broken function leaves its output as it was."""
    library = LIBRARIES[variant]._replace(**{broken: lambda *arguments: None})
    assert agreeing(library) == COMPARISONS.keys() - {operation}
    assert f"torch for {operation}, whose samples differed" in str(CpuKernels(library, agreeing(library)))


@usable
@pytest.mark.parametrize("preset", ["torch", "omn", "normuon"])
def test_a_run_without_kernels_has_the_same_bits(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = _spied(monkeypatch)
    with_kernels = _trained(preset)
    assert set(used) >= {"write_direction", "add_update", "adamw"}
    used.clear()
    monkeypatch.setenv("OMN_DIST_KERNELS", "torch")
    assert all(map(torch.equal, with_kernels, _trained(preset)))
    assert used == []


def test_torch_takes_everything_that_the_kernels_take() -> None:
    parameter = torch.zeros(2, 3)
    TORCH.apply_updates([parameter], [torch.ones(2, 3)], 0.9, 0.1, cautious=False)
    assert torch.equal(parameter, torch.full((2, 3), -0.1))


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
