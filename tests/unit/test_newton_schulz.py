"""Newton-Schulz against torch's own, against SVD, and its guards; what a form costs and takes."""

from typing import Any

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from omn_dist import orthogonalize
from omn_dist.algorithms import iteration
from omn_dist.algorithms.coefficients import SCHEDULES
from omn_dist.algorithms.iteration import standard_flops, standard_form
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
    # fp32 rounding through five iterations whose slope at zero is 3.4445^5 = 485: 485 * 2^-24, 3e-5.
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


# --- forms ----------------------------------------------------------------------------------------


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
def test_a_form_takes_no_memory_but_its_scratch(batch: tuple[int, ...]) -> None:
    given = torch.randn(*batch, 100, 130, generator=torch.Generator().manual_seed(4))
    scratch, schedule = Scratch(), SCHEDULES["quintic"]
    given /= torch.linalg.vector_norm(given, dim=(-2, -1), keepdim=True)
    out = torch.empty_like(given)
    standard_form(given, schedule, scratch, out)
    num_bytes = scratch.num_bytes
    assert num_bytes == 2 * 4 * max(1, *batch, 1) * (100 * 100 + 100 * 130)
    with _Storages() as found:
        assert standard_form(given, schedule, scratch, out) is out
    names = [("gram", 100 * 100), ("polynomial", 100 * 100), *((name, 100 * 130) for name in iteration.ITERATES)]
    known = {scratch.take(name, (size,), given.dtype, given.device).data_ptr() for name, size in names}
    assert found.addresses == known | {given.data_ptr(), out.data_ptr()}
    assert scratch.num_bytes == num_bytes


def test_names_of_forms() -> None:
    for recipe in RECIPES:
        assert build_recipe(recipe, form="standard").form == "standard"
        with pytest.raises(SettingsError, match="unknown form 'standart'; did you mean 'standard'"):
            build_recipe(recipe, form="standart")  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match=r"unknown form 'symmetric' \(known: auto, gram, standard\)"):
            build_recipe(recipe, form="symmetric")  # type: ignore[arg-type]
    for form in ("gram", "auto"):
        with pytest.raises(SettingsError, match="expected 'standard'; the Gram form needs float32"):
            build_recipe("torch", form=form)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["quintic", "cubic"])
@pytest.mark.parametrize("shape", [*SHAPES, (100, 130), (3, 130, 100)])
def test_flops_are_those_of_the_products(shape: tuple[int, ...], name: str) -> None:
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    *batch, short, long = *shape[:-2], *sorted(shape[-2:])
    with FlopCounterMode(display=False) as counter:
        orthogonalize(direction, build_recipe("scaled", name))
    assert counter.get_total_flops() == (batch[0] if batch else 1) * standard_flops(short, long, 5, cubic=name == "cubic")
