"""Newton-Schulz by a kernel of our own: bit for bit what torch's products give, for every shape that it takes; and never needed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from omn_dist.algorithms import kernels, products
from omn_dist.algorithms.coefficients import SCHEDULES
from omn_dist.algorithms.iteration import standard_form
from omn_dist.algorithms.newton_schulz import build_recipe, orthogonalize, orthogonalize_into
from omn_dist.algorithms.scratch import Scratch

usable = pytest.mark.skipif(not products.usable(), reason="needs a C compiler and a CPU with AVX512_BF16 and without AMX")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _matrix(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "chunks", lambda iterate: None)


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
# One pair, or a few, beyond a chunk: how they are summed shows in a few numbers of a step, if in any.
@example(short=514, more=30, tall=False, schedule="quintic", recipe="torch")
@example(short=516, more=1262, tall=False, schedule="polar_express", recipe="torch")
@example(short=214, more=300, tall=True, schedule="polar_express", recipe="torch")
@example(short=518, more=508, tall=True, schedule="quintic", recipe="torch")
@example(short=670, more=356, tall=False, schedule="quintic", recipe="torch")
def test_bits_of_torch(short: int, more: int, tall: bool, schedule: str, recipe: str) -> None:
    shape = (short + more, short) if tall else (short, short + more)
    direction, chosen = _matrix(short, *shape), build_recipe(recipe, schedule)
    ours = orthogonalize(direction, chosen)
    with pytest.MonkeyPatch.context() as monkeypatch:
        _by_torch(monkeypatch)
        assert torch.equal(ours, orthogonalize(direction, chosen))


@usable
@pytest.mark.parametrize("shape", [(512, 512), (1368, 512), (512, 1368), (256, 1024), (2048, 512)])
def test_shapes_of_models_are_taken(shape: tuple[int, int]) -> None:
    matrix = torch.empty(shape, dtype=torch.bfloat16)
    assert products.chunks(matrix.mT if shape[0] > shape[1] else matrix) is not None


@usable
@pytest.mark.parametrize("shape", [(160, 320), (320, 160), (192, 192)])
def test_batches_and_results_in_place(shape: tuple[int, int]) -> None:
    batch, recipe = _matrix(0, 3, *shape), build_recipe("torch")
    expected = [orthogonalize(matrix, recipe) for matrix in batch]
    assert all(map(torch.equal, orthogonalize(batch, recipe), expected))
    orthogonalize_into(batch, batch, recipe, Scratch())
    assert all(map(torch.equal, batch, expected))


@usable
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_given_stays(transposed: bool) -> None:
    given = _matrix(1, 300, 140).mT if transposed else _matrix(1, 140, 300)
    before, scratch = given.clone(), Scratch()
    found = standard_form(given.mul_(0.03), SCHEDULES["quintic"], scratch)
    assert torch.equal(given, before.mul_(0.03))
    # Of one iterate; the other is for products that cannot go in place.
    assert scratch.num_bytes == 2 * (2 * 140 * 140 + 140 * 300 + 48 * 300)
    assert torch.equal(found, standard_form(before.contiguous(), SCHEDULES["quintic"]))


@usable
def test_numbers_that_are_not_finite_arrive() -> None:
    for number in (float("nan"), float("inf")):
        direction = _matrix(2, 130, 258)
        direction[7, 11] = number
        assert bool(orthogonalize(direction, "torch").isnan().any())
    assert torch.equal(orthogonalize(torch.zeros(130, 258), "torch"), torch.zeros(130, 258, dtype=torch.bfloat16))


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
def test_what_torch_multiplies(matrix: Tensor) -> None:
    assert products.chunks(matrix) is None


@usable
def test_several_threads_are_left_to_torch() -> None:
    matrix = torch.zeros(200, 300, dtype=torch.bfloat16)
    assert products.chunks(matrix) is not None
    torch.set_num_threads(2)
    assert products.chunks(matrix) is None


@usable
def test_a_kernel_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = products.newton_schulz

    def changed(start: Tensor, iterate: Tensor, end: Tensor, *rest: Any) -> None:
        real(start, iterate, end, *rest)
        end[-1, 0] += 1

    assert products._chunks.__wrapped__(256, 640, False) is not None
    monkeypatch.setattr(products, "newton_schulz", changed)
    assert products._chunks.__wrapped__(256, 640, False) is None


@usable
@pytest.mark.parametrize("shape", [(512, 1368), (768, 768), (128, 1026), (514, 514)])
@pytest.mark.parametrize("transposed", [False, True])
def test_an_order_of_sums_that_is_not_torch_s_is_found_out(
    shape: tuple[int, int], transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every product by itself: where another one of the known chunks gives other sums, it does not pass for torch's."""
    found = products._chunks(*shape, transposed)
    assert found is not None
    chosen = {getattr(found, name) for name, _ in found._fields_} - {products._CHUNKS[0]}
    assert chosen, "choose a shape whose depth torch does not sum at once"
    for chunk in chosen:
        monkeypatch.setattr(products, "_CHUNKS", tuple(other for other in products._CHUNKS if other != chunk))
        assert products._tried(*shape, transposed) is None, f"a chunk of {chunk} is torch's, and another one passed"
        monkeypatch.undo()


def test_without_the_kernel_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    direction = _matrix(3, 128, 160)
    expected = orthogonalize(direction, "torch")
    monkeypatch.setattr(kernels, "usable", lambda: False)
    for function in (products.usable, products._chunks):
        function.cache_clear()
    try:
        assert products.chunks(direction) is None
        assert torch.equal(orthogonalize(direction, "torch"), expected)
    finally:
        for function in (products.usable, products._chunks):
            function.cache_clear()


@usable
def test_tensors_without_memory_of_their_own_are_left_to_torch() -> None:
    with FakeTensorMode():
        for shape in ((256, 128), (128, 256)):
            assert orthogonalize(torch.empty(shape), "torch").shape == shape
    with torch.inference_mode():
        assert torch.equal(orthogonalize(_matrix(5, 256, 128), "torch"), orthogonalize(_matrix(5, 256, 128), "torch"))


@usable
def test_tensors_that_were_changed_say_so() -> None:
    direction, out = _matrix(4, 128, 128), torch.empty(128, 128, dtype=torch.bfloat16)
    before = out._version
    orthogonalize_into(out, direction, build_recipe("torch"), Scratch())
    assert out._version > before
