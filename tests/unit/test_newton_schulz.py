"""Newton-Schulz against torch's own, against SVD, and its guards; the symmetric form."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from omn_dist import orthogonalize
from omn_dist.algorithms import iteration
from omn_dist.algorithms.coefficients import SCHEDULES
from omn_dist.algorithms.iteration import chosen_form, standard_flops, standard_form, strips, symmetric_flops
from omn_dist.algorithms.newton_schulz import RECIPES, build_recipe
from omn_dist.algorithms.scale import SCALE_MODES, adjusted_lr
from omn_dist.algorithms.scratch import Scratch
from omn_dist.settings import SettingsError

SHAPES = [(16, 16), (10, 3), (3, 8), (1, 16), (16, 1), (64, 200), (200, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_torch_recipe_is_bitwise_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = direction.clone()
    found = orthogonalize(direction, "torch")
    assert torch.equal(direction, before)
    expected = _zeropower_via_newtonschulz(direction.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_omn_keeps_singular_vectors_and_lands_in_the_band(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    short = min(shape)
    left = torch.linalg.qr(torch.randn(shape[0], short, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(shape[1], short, generator=generator, dtype=torch.float64)).Q
    values = torch.logspace(0, -2, short, dtype=torch.float64)
    update = orthogonalize((left @ torch.diag(values) @ right.T).float(), "omn").double()
    core = left.T @ update @ right
    found = core.diagonal()
    # FIELD: singular values 1e-3..1 land in [0.47, 1.20]; the polynomial acts on each one alone.
    assert float(found.min()) > 0.46
    assert float(found.max()) < 1.21
    # fp32 rounding through five iterations whose slope at zero is 3.4445^5 = 485: 485 * 2^-24 is 3e-5.
    assert float((core - torch.diag(found)).abs().max()) < 1e-4
    assert float((left @ core @ right.T - update).abs().max()) < 1e-4


def test_the_scale_of_the_direction_does_not_matter_in_the_documented_range() -> None:
    direction = torch.randn(12, 20, generator=torch.Generator().manual_seed(3))
    reference = orthogonalize(direction)
    for scale in (1e-4, 1e4, 1e30):
        assert torch.allclose(orthogonalize(direction * scale), reference, rtol=0, atol=1e-3)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_zero_gives_zero(recipe: str) -> None:
    assert not orthogonalize(torch.zeros(4, 6), recipe).any()


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"shape \(4,\), expected a matrix"):
        orthogonalize(torch.ones(4))
    with pytest.raises(ValueError, match="did you mean 'torch'"):
        orthogonalize(torch.ones(4, 4), "toch")  # type: ignore[arg-type]


def test_scale_modes() -> None:
    assert [adjusted_lr(1.0, mode, 32, 8) for mode in SCALE_MODES] == pytest.approx([2.0, 1.1313708, 2.0, 5.6568542, 1.0])
    assert [adjusted_lr(1.0, mode, 8, 32) for mode in SCALE_MODES] == pytest.approx([1.0, 1.1313708, 0.5, 5.6568542, 1.0])
    with pytest.raises(ValueError, match="unknown scale 'spectral'"):
        adjusted_lr(1.0, "spectral", 8, 32)  # type: ignore[arg-type]


# --- the symmetric form --------------------------------------------------------------------------------------------------

# Strips of 16, 32, 48 and 80, the last one narrower or as wide, or missing; a single one.
STRIPPED = [(64, 64), (100, 130), (150, 151), (161, 300), (257, 300), (16, 50)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _normalised(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    return (direction / torch.linalg.vector_norm(direction, dim=(-2, -1), keepdim=True)).to(dtype)


def _counted_flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def _distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", STRIPPED)
def test_the_symmetric_form_is_as_exact_as_the_standard_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    given, schedule = _normalised(*shape, dtype=dtype), SCHEDULES["quintic"]
    exact = standard_form(given.double(), schedule)
    standard, found = (_distance(standard_form(given, schedule, symmetric=symmetric), exact) for symmetric in (False, True))
    # 0.98 to 1.01 times the error of the standard form was seen.
    assert found < 1.1 * standard
    assert found < {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    # The transpose of a contiguous matrix, as tall directions come.
    tall = given.mT.contiguous().mT
    assert _distance(standard_form(tall, schedule, symmetric=True), exact) < 1.1 * standard


@pytest.mark.parametrize("shape", STRIPPED)
def test_a_batch_in_the_symmetric_form_is_its_matrices(shape: tuple[int, int]) -> None:
    schedule = SCHEDULES["quintic"]
    # The rectangular product is a batched one, which may round otherwise; these had the same bits on the machine at hand.
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 3e-2)):
        batch = _normalised(3, *shape, dtype=dtype)
        for found, matrix in zip(standard_form(batch, schedule, symmetric=True), batch, strict=True):
            assert _distance(found, standard_form(matrix, schedule, symmetric=True).double()) < tolerance


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", STRIPPED)
def test_what_is_mirrored_is_exactly_symmetric(shape: tuple[int, int], dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    scratch, short, given = Scratch(), shape[0], _normalised(*batch, *shape, dtype=dtype)
    standard_form(given, SCHEDULES["quintic"], scratch, symmetric=True)
    for name in ("gram", "polynomial"):
        found = scratch.take(name, (*batch, short, short), dtype, given.device)
        for start, stop in strips(short):
            assert torch.equal(found[..., start:stop, stop:], found[..., stop:, start:stop].mT), name
            assert found[..., stop:, start:stop].any() or stop == short


@pytest.mark.parametrize("name", ["quintic", "cubic"])
@pytest.mark.parametrize("shape", [*STRIPPED, (5, 9), (1, 3)])
def test_flops_of_the_symmetric_form_are_those_of_its_products(shape: tuple[int, int], name: str) -> None:
    schedule = SCHEDULES[name]
    expected = symmetric_flops(*shape, schedule.num_steps, cubic=schedule.is_cubic)
    assert _counted_flops(lambda: standard_form(_normalised(*shape), schedule, symmetric=True)) == expected
    assert _counted_flops(lambda: standard_form(_normalised(2, *shape), schedule, symmetric=True)) == 2 * expected
    standard = standard_flops(*shape, schedule.num_steps, cubic=schedule.is_cubic)
    assert expected == standard if shape[0] <= 16 else expected < 0.85 * standard


def test_flops_of_the_symmetric_form_in_closed_form() -> None:
    for short, long in ((64, 200), (1024, 2736)):
        assert 4 * symmetric_flops(short, long, 5) == 5 * (13 * short * short * long + 5 * short**3)
        assert 4 * symmetric_flops(short, long, 5, cubic=True) == 5 * 13 * short * short * long


def test_the_symmetric_form_runs_from_a_measured_size_on() -> None:
    quintic = SCHEDULES["quintic"]
    forms = {
        torch.float32: {(255, 4096): "standard", (256, 1023): "standard", (256, 1024): "symmetric", (512, 512): "symmetric"},
        torch.bfloat16: {(1024, 1024): "standard", (511, 4096): "standard", (512, 3072): "symmetric", (2048, 2048): "symmetric"},
    }
    for dtype, by_shape in forms.items():
        for shape, form in by_shape.items():
            assert chosen_form("symmetric", quintic, dtype, *shape) == form, (dtype, shape)
            # Not by FLOPs: its time does not follow them as that of the others does.
            assert chosen_form("auto", quintic, dtype, *shape) != "symmetric"
            assert chosen_form("standard", quintic, dtype, *shape) == "standard"
    assert chosen_form("symmetric", quintic, torch.float16, 512, 3072) == "symmetric"


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_call_in_the_symmetric_form(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    standard, symmetric = (build_recipe(recipe, form=form) for form in ("standard", "symmetric"))
    directions = [torch.randn(shape, generator=torch.Generator().manual_seed(5)) for shape in (*SHAPES, (100, 130), (3, 130, 100))]
    for direction in directions:
        assert torch.equal(orthogonalize(direction, symmetric), orthogonalize(direction, standard)), "too small"
    monkeypatch.setattr(iteration, "_SYMMETRIC_FROM", {2: (20, 0), 4: (20, 0)})
    for direction in directions:
        *batch, short, long = *direction.shape[:-2], *sorted(direction.shape[-2:])
        count = symmetric_flops if short >= 20 else standard_flops
        assert _counted_flops(lambda x=direction: orthogonalize(x, symmetric)) == (3 if batch else 1) * count(short, long, 5)
        reference = orthogonalize(direction, standard).double()
        assert _distance(orthogonalize(direction, symmetric), reference) < (3e-6 if recipe == "omn" else 3e-2)
    zero = torch.zeros(40, 60)
    assert not orthogonalize(zero, symmetric).any()


class _Storages(TorchDispatchMode):
    """The addresses of the memory that results of operations lie in."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.addresses.update(tensor.untyped_storage().data_ptr() for tensor in tree_leaves(result))
        return result


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_form_takes_no_memory_but_its_scratch(symmetric: bool, batch: tuple[int, ...]) -> None:
    scratch, given, schedule = Scratch(), _normalised(*batch, 100, 130), SCHEDULES["quintic"]
    out = torch.empty_like(given)
    standard_form(given, schedule, scratch, out, symmetric=symmetric)
    num_bytes = scratch.num_bytes
    assert num_bytes == 2 * 4 * max(1, *batch, 1) * (100 * 100 + 100 * 130)
    with _Storages() as found:
        assert standard_form(given, schedule, scratch, out, symmetric=symmetric) is out
    names = [("gram", 100 * 100), ("polynomial", 100 * 100), *((name, 100 * 130) for name in iteration.ITERATES)]
    known = {scratch.take(name, (size,), given.dtype, given.device).data_ptr() for name, size in names}
    assert found.addresses == known | {given.data_ptr(), out.data_ptr()}
    assert scratch.num_bytes == num_bytes


def test_names_of_forms() -> None:
    assert build_recipe("torch", form="symmetric").form == "symmetric"
    for recipe in RECIPES:
        with pytest.raises(SettingsError, match="unknown form 'symetric'; did you mean 'symmetric'"):
            build_recipe(recipe, form="symetric")  # type: ignore[arg-type]
    for form in ("gram", "auto"):
        with pytest.raises(SettingsError, match="expected 'standard' or 'symmetric'; the Gram form needs float32"):
            build_recipe("torch", form=form)  # type: ignore[arg-type]
