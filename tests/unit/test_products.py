"""Newton-Schulz by the C kernel: bit for bit torch's products, for every shape that it takes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from omn_dist.algorithms.coefficients import SCHEDULES
from omn_dist.algorithms.iteration import TORCH_ITERATION, IterationKernels, standard_form
from omn_dist.algorithms.newton_schulz import Recipe, build_recipe, orthogonalize, orthogonalize_into, recipe_by_name
from omn_dist.algorithms.scratch import Scratch
from omn_dist.kernels.cpu import products
from omn_dist.kernels.cpu.kernels import CpuKernels, build_cpu_kernels
from omn_dist.kernels.cpu.library import NoKernelsError
from omn_dist.kernels.cpu.products import Products


def _kernels() -> CpuKernels | None:
    """Those that have products, where this machine has them."""
    try:
        found = build_cpu_kernels()
    except NoKernelsError:
        return None
    return found if found._products is not None else None


usable = pytest.mark.skipif(_kernels() is None, reason="needs a C compiler and a CPU with AVX512_BF16 and without AMX")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _matrix(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def kernels() -> CpuKernels:
    found = _kernels()
    assert found is not None
    return found


@pytest.fixture
def tried(kernels: CpuKernels) -> Products:
    assert kernels._products is not None
    return kernels._products


def _orthogonalized(direction: Tensor, recipe: Recipe, kernels: IterationKernels, *, is_warm: bool = True) -> Tensor:
    """As :func:`orthogonalize`, by these kernels, which must know the shape."""
    if isinstance(kernels, CpuKernels) and is_warm:
        kernels.warm_up([direction.shape[-2:]], recipe.dtype)  # type: ignore[list-item]
        assert kernels._products is not None
        assert kernels._products._chunks[(*sorted(direction.shape[-2:]), direction.size(-2) > direction.size(-1))]
    out = torch.empty(direction.shape, dtype=direction.dtype if recipe.restore_dtype else recipe.dtype)
    orthogonalize_into(out, direction, recipe, Scratch(), kernels)
    return out


KERNELS = _kernels()
"""Of all examples."""


@usable
@settings(max_examples=25, deadline=None)
@given(
    short=st.integers(64, 200).map(lambda half: 2 * half),
    more=st.integers(0, 500).map(lambda half: 2 * half),
    tall=st.booleans(),
    schedule=st.sampled_from(["quintic", "cubic", "polar_express"]),
    recipe=st.sampled_from(["torch", "scaled"]),
)
@example(short=512, more=856, tall=True, schedule="quintic", recipe="torch")
@example(short=512, more=856, tall=False, schedule="quintic", recipe="torch")
@example(short=768, more=0, tall=False, schedule="quintic", recipe="torch")
@example(short=1000, more=24, tall=True, schedule="quintic", recipe="torch")
@example(short=128, more=0, tall=False, schedule="deepseek_v4", recipe="scaled")
# One pair, or a few, beyond a chunk: how they are summed shows in few numbers of a step.
@example(short=514, more=30, tall=False, schedule="quintic", recipe="torch")
@example(short=516, more=1262, tall=False, schedule="polar_express", recipe="torch")
@example(short=214, more=300, tall=True, schedule="polar_express", recipe="torch")
@example(short=518, more=508, tall=True, schedule="quintic", recipe="torch")
@example(short=670, more=356, tall=False, schedule="quintic", recipe="torch")
def test_bits_of_torch(short: int, more: int, tall: bool, schedule: str, recipe: str) -> None:
    shape = (short + more, short) if tall else (short, short + more)
    direction, chosen = _matrix(short, *shape), build_recipe(recipe, schedule)
    assert KERNELS is not None
    assert torch.equal(_orthogonalized(direction, chosen, KERNELS), orthogonalize(direction, chosen))


@usable
@pytest.mark.parametrize("shape", [(512, 512), (1368, 512), (512, 1368), (256, 1024), (2048, 512)])
def test_shapes_of_models_are_taken(shape: tuple[int, int], tried: Products) -> None:
    matrix = torch.empty(shape, dtype=torch.bfloat16)
    iterate = matrix.mT if shape[0] > shape[1] else matrix
    assert tried.chunks(iterate) is None, "not tried yet"
    tried.warm_up([shape])
    assert tried.chunks(iterate) is not None


@usable
@pytest.mark.parametrize("shape", [(160, 320), (320, 160), (192, 192)])
def test_batches_and_results_in_place(shape: tuple[int, int], kernels: CpuKernels) -> None:
    batch, recipe = _matrix(0, 3, *shape), build_recipe("torch")
    expected = [orthogonalize(matrix, recipe) for matrix in batch]
    assert all(map(torch.equal, _orthogonalized(batch, recipe, kernels), expected))
    orthogonalize_into(batch, batch, recipe, Scratch(), kernels)
    assert all(map(torch.equal, batch, expected))


@usable
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_given_stays(transposed: bool, kernels: CpuKernels) -> None:
    kernels.warm_up([(140, 300), (300, 140)], torch.bfloat16)
    given = _matrix(1, 300, 140).mT if transposed else _matrix(1, 140, 300)
    before, scratch = given.clone(), Scratch()
    found = kernels.newton_schulz(given.mul_(0.03), SCHEDULES["quintic"], scratch)
    assert torch.equal(given, before.mul_(0.03))
    # Of one iterate; the other is for products that cannot go in place.
    assert scratch.num_bytes == 2 * (2 * 140 * 140 + 140 * 300 + 48 * 300)
    assert torch.equal(found, standard_form(before.contiguous(), SCHEDULES["quintic"]))


@usable
def test_numbers_that_are_not_finite_arrive(kernels: CpuKernels) -> None:
    recipe = recipe_by_name("torch")
    for number in (float("nan"), float("inf")):
        direction = _matrix(2, 130, 258)
        direction[7, 11] = number
        assert bool(_orthogonalized(direction, recipe, kernels).isnan().any())
    assert torch.equal(_orthogonalized(torch.zeros(130, 258), recipe, kernels), torch.zeros(130, 258, dtype=torch.bfloat16))


@usable
@pytest.mark.parametrize(
    "matrix",
    [
        torch.zeros(200, 300),
        torch.zeros(200, 300, dtype=torch.float16),
        torch.zeros(126, 300, dtype=torch.bfloat16),
        torch.zeros(129, 300, dtype=torch.bfloat16),
        torch.zeros(200, 301, dtype=torch.bfloat16),
    ],
    ids=["float32", "float16", "small", "odd short side", "odd long side"],
)
def test_what_torch_multiplies(matrix: Tensor, kernels: CpuKernels, tried: Products) -> None:
    kernels.warm_up([tuple(matrix.shape)], matrix.dtype)  # type: ignore[list-item]
    assert tried.chunks(matrix) is None
    found = kernels.newton_schulz(matrix, SCHEDULES["quintic"], Scratch())
    assert torch.equal(found, standard_form(matrix, SCHEDULES["quintic"]))


@usable
def test_several_threads_are_left_to_torch(tried: Products) -> None:
    matrix = torch.zeros(200, 300, dtype=torch.bfloat16)
    tried.warm_up([(200, 300)])
    assert tried.chunks(matrix) is not None
    torch.set_num_threads(2)
    assert tried.chunks(matrix) is None
    tried.warm_up([(210, 300)])
    torch.set_num_threads(1)
    assert tried.chunks(matrix) is not None
    assert tried.chunks(torch.zeros(210, 300, dtype=torch.bfloat16)) is None, "not tried with several threads"


@usable
def test_matrices_with_gaps_or_lazy_signs_are_left_to_torch(kernels: CpuKernels, tried: Products) -> None:
    tried.warm_up([(200, 300), (300, 200)])
    matrix = _matrix(6, 200, 300).mul_(0.03)
    wide = torch.zeros(200, 310, dtype=torch.bfloat16)[:, :300]
    for iterate in (torch._neg_view(matrix), wide, wide.mT.contiguous().mT[:, ::2], torch.zeros(200, 300, 2).bfloat16()[..., 0]):
        assert tried.chunks(iterate) is None
    found = kernels.newton_schulz(torch._neg_view(matrix), SCHEDULES["quintic"], Scratch())
    assert torch.equal(found, standard_form(-matrix, SCHEDULES["quintic"]))


@usable
def test_a_kernel_with_other_bits_is_not_used(tried: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tried.run

    def changed(start: Tensor, iterate: Tensor, end: Tensor, *rest: Any) -> None:
        real(start, iterate, end, *rest)
        end[-1, 0] += 1

    assert tried.tried(256, 640, False) is not None
    monkeypatch.setattr(tried, "run", changed)
    assert tried.tried(256, 640, False) is None


@usable
@pytest.mark.parametrize("shape", [(512, 1368), (768, 768), (128, 1026), (514, 514)])
@pytest.mark.parametrize("transposed", [False, True])
def test_an_order_of_sums_that_is_not_torch_s_is_found_out(
    shape: tuple[int, int], transposed: bool, tried: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every product by itself: another chunk, which gives other sums, does not pass for torch's."""
    found = tried.tried(*shape, transposed)
    assert found is not None
    chosen = {getattr(found, name) for name, _ in found._fields_} - {products.CHUNKS[0]}
    assert chosen, "choose a shape whose depth torch does not sum at once"
    for chunk in chosen:
        monkeypatch.setattr(products, "CHUNKS", tuple(other for other in products.CHUNKS if other != chunk))
        assert tried.tried(*shape, transposed) is None, f"a chunk of {chunk} is torch's, and another one passed"
        monkeypatch.undo()


@pytest.mark.parametrize("shape", [(128, 160), (160, 128)])
def test_shapes_that_were_not_tried_are_torch_s(shape: tuple[int, int]) -> None:
    direction, recipe = _matrix(3, *shape), recipe_by_name("torch")
    expected = orthogonalize(direction, recipe)
    for kernels in (TORCH_ITERATION, _kernels() or TORCH_ITERATION):
        assert torch.equal(_orthogonalized(direction, recipe, kernels, is_warm=False), expected)


@usable
def test_tensors_without_memory_of_their_own_are_left_to_torch(kernels: CpuKernels) -> None:
    recipe = recipe_by_name("torch")
    for shape in ((256, 128), (128, 256)):
        kernels.warm_up([shape], torch.bfloat16)
        with FakeTensorMode():
            assert orthogonalize(torch.empty(shape), "torch").shape == shape
            assert _orthogonalized(torch.empty(shape), recipe, kernels).shape == shape
    with torch.inference_mode():
        assert torch.equal(_orthogonalized(_matrix(5, 256, 128), recipe, kernels), orthogonalize(_matrix(5, 256, 128), "torch"))


@usable
def test_tensors_that_were_changed_say_so(kernels: CpuKernels) -> None:
    direction, out = _matrix(4, 128, 128), torch.empty(128, 128, dtype=torch.bfloat16)
    before = out._version
    kernels.warm_up([(128, 128)], torch.bfloat16)
    orthogonalize_into(out, direction, build_recipe("torch"), Scratch(), kernels)
    assert out._version > before
