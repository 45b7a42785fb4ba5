"""AdamW by the C kernels and torch's root: bit for bit torch's loop over tensors."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import LIBRARIES, SPECIAL, numbers, same, usable, variants
from torch import Tensor, nn

from omn_dist.algorithms.adamw import AdamWCoefficients, AdamWShards
from omn_dist.kernels import TORCH
from omn_dist.kernels.cpu.elementwise import Elementwise
from omn_dist.kernels.cpu.kernels import CpuKernels, build_cpu_kernels
from omn_dist.kernels.cpu.library import load_library


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernels() -> CpuKernels:
    return build_cpu_kernels()


def _adamw(elementwise: Elementwise | None, shards: AdamWShards, coefficients: AdamWCoefficients) -> None:
    """One step by C, which must take all shards, or for ``None`` by torch."""
    if elementwise is None:
        TORCH.adamw(shards, coefficients, batch_invariant=True)
    else:
        assert not elementwise.adamw(shards, coefficients).parameters


@variants
@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70) | st.just(70_001) | st.just(2**17 + 3), min_size=1, max_size=3),
    seed=st.integers(0, 10**6),
    weight_decay=st.sampled_from([0.0, 0.1]),
    betas=st.sampled_from([(0.9, 0.95), (0.9, 0.999), (0.4, 0.6)]),
)
def test_adamw(variant: str, lengths: list[int], seed: int, weight_decay: float, betas: tuple[float, float]) -> None:
    parameters = [nn.Parameter(numbers(seed + index, length).nan_to_num()) for index, length in enumerate(lengths)]
    reference = torch.optim.AdamW(parameters, lr=3e-3, betas=betas, weight_decay=weight_decay, foreach=False)
    ours = [parameter.detach().clone() for parameter in parameters]
    first, second = ([torch.zeros_like(tensor) for tensor in ours] for _ in range(2))
    steps = [torch.zeros(()) for _ in ours]
    coefficients = AdamWCoefficients(lr=3e-3, betas=betas, eps=1e-8, weight_decay=weight_decay)
    for step in range(3):
        for index, parameter in enumerate(parameters):
            parameter.grad = numbers(seed + 10 * step + index + 3, len(parameter))
        gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        reference.step()
        _adamw(Elementwise(LIBRARIES[variant]), AdamWShards(ours, gradients, first, second, steps), coefficients)
    for index, parameter in enumerate(parameters):
        state = reference.state[parameter]
        assert same(ours[index], parameter.detach())
        assert same(first[index], state["exp_avg"])
        assert same(second[index], state["exp_avg_sq"])
        assert steps[index] == state["step"]


@variants
def test_shards_at_different_steps(variant: str) -> None:
    """As after a load, or where some had no gradient; each takes the correction of its own step."""
    coefficients = AdamWCoefficients(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    def stepped(elementwise: Elementwise | None) -> list[list[Tensor]]:
        tensors = [[numbers(10 * kind + index, 33 + index).nan_to_num().abs() for index in range(4)] for kind in range(4)]
        shards = AdamWShards(*tensors, [torch.tensor(float(step)) for step in (3, 0, 3, 7)])
        _adamw(elementwise, shards, coefficients)
        return list(shards)

    for ours, theirs in zip(stepped(Elementwise(LIBRARIES[variant])), stepped(None), strict=True):
        assert all(map(torch.equal, ours, theirs))


@variants
def test_roots_of_all_magnitudes_are_those_of_torch(variant: str) -> None:
    second = torch.arange(0, 0x7F800000, 211, dtype=torch.int32).view(torch.float32)

    def stepped(elementwise: Elementwise | None) -> list[Tensor]:
        tensors = [torch.ones_like(second), torch.zeros_like(second), torch.ones_like(second), second.clone()]
        shards = AdamWShards(*([tensor] for tensor in (*tensors, torch.zeros(()))))
        _adamw(elementwise, shards, AdamWCoefficients(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1))
        return tensors

    assert all(map(same, stepped(Elementwise(LIBRARIES[variant])), stepped(None)))


def test_the_root_of_a_number_does_not_depend_on_its_place() -> None:
    """The blocks of AdamW's kernel rely on it. Every length has its own tail."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 0x7F800000, (20_000,), generator=generator, dtype=torch.int32)
    values = torch.cat((bits.view(torch.float32), torch.tensor(SPECIAL * 50)))[torch.randperm(20_500, generator=generator)]
    whole = torch.sqrt(values)
    for length in range(1, 201):
        for start in (0, 1, 5):
            parts = [torch.sqrt(part) for part in values[start : start + 40 * length].split(length)]
            assert same(torch.cat(parts), whole[start : start + 40 * length]), (length, start)


@usable
@pytest.mark.parametrize("changed", range(5))
def test_shards_that_adamw_does_not_take_are_torch_s(kernels: CpuKernels, changed: int) -> None:
    """Among others that it takes."""
    coefficients = AdamWCoefficients(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    def shards() -> AdamWShards:
        tensors = [[numbers(10 * kind + index, 33).nan_to_num().abs() for index in range(3)] for kind in range(4)]
        for kind in range(4):
            if changed == 4:
                tensors[kind][1] = tensors[kind][1].double()
            elif changed == kind:
                tensors[kind][1] = torch.stack((tensors[kind][1], torch.zeros(33)), dim=1)[:, 0]
        return AdamWShards(*tensors, [torch.tensor(2.0) for _ in range(3)])

    ours, theirs = shards(), shards()
    left = Elementwise(load_library()).adamw(shards(), coefficients)
    assert [len(tensors) for tensors in left] == [1] * 5
    kernels.adamw(ours, coefficients, batch_invariant=True)
    TORCH.adamw(theirs, coefficients, batch_invariant=True)
    for one, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, one, other))
