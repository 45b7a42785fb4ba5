"""Rectangles together: bit for bit those one by one, whatever the settings, dtypes and strides, in a fixed number of launches."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from launches import Launches
from torch import Tensor, nn

from omn_dist import DualOptimizer
from omn_dist._multi_tensor_step import MultiTensorStep
from omn_dist.algorithms import multi_tensor, muon, normuon
from omn_dist.algorithms.multi_tensor import batches
from omn_dist.algorithms.muon import UpdateSettings
from omn_dist.algorithms.scratch import Scratch

SHAPES = ((3, 5), (1, 16), (16, 1), (7, 203), (3, 5))
SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-45, 3e38, 1.00390625, 1.01171875)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _numbers(seed: int, dtype: torch.dtype, gap: int = 0) -> list[Tensor]:
    """Rectangles of many magnitudes with special numbers among them, and ``gap`` foreign columns between their rows."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for num_rows, num_columns in SHAPES:
        numbers = torch.randn(num_rows, num_columns + gap, generator=generator)
        numbers *= 10.0 ** torch.randint(-6, 3, numbers.shape, generator=generator)
        numbers.view(-1)[torch.randint(0, numbers.numel(), (4,), generator=generator)] = torch.tensor(SPECIAL)[seed % 7 :][:4]
        found.append(numbers.to(dtype)[:, :num_columns])
    return found


def _clones(tensors: list[Tensor]) -> list[Tensor]:
    # Strides too.
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in tensors]


def _assert_same(found: list[Tensor], expected: list[Tensor], what: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan()), what
        assert torch.equal(one.nan_to_num(7.0, 8.0, 9.0), other.nan_to_num(7.0, 8.0, 9.0)), what


SETTINGS = UpdateSettings(lr=0.02, weight_decay=0.1, momentum=0.95, momentum_rule="ema", nesterov=True, scale="1")


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", ["sum", "ema"])
def test_directions_and_momenta(rule: Any, nesterov: bool, wire: torch.dtype) -> None:
    ways = itertools.product(DTYPES, DTYPES, (False, True), (0, 3), (0.95, 0.3))
    for number, (of_gradient, of_momentum, commit, gap, coefficient) in enumerate(ways):
        settings = replace(SETTINGS, momentum=coefficient, momentum_rule=rule, nesterov=nesterov)
        gradients, momenta = _numbers(number, of_gradient, gap), _numbers(number + 1, of_momentum)
        out = [torch.zeros_like(tensor, dtype=wire) for tensor in gradients]
        before, kept, expected = _clones(gradients), _clones(momenta), _clones(out)
        for gradient, momentum, target in zip(gradients, kept, expected, strict=True):
            muon.prepare(gradient, momentum, settings, target, commit=commit, scratch=Scratch())
        multi_tensor.prepare(gradients, momenta, out, coefficient, rule, nesterov, commit=commit)
        _assert_same(out, expected, (of_gradient, of_momentum, commit, gap, coefficient))
        _assert_same(momenta, kept, (of_gradient, of_momentum, commit, gap, coefficient))
        _assert_same(gradients, before, "a gradient changed")
        if not commit:
            for gradient, momentum in zip(gradients, kept, strict=True):
                muon.commit(gradient, momentum, settings)
            multi_tensor.update_momenta(gradients, momenta, coefficient, rule)
            _assert_same(momenta, kept, (of_gradient, of_momentum, gap, coefficient))


@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1, 70.0])
def test_updates(weight_decay: float, cautious: bool) -> None:
    settings = replace(SETTINGS, weight_decay=weight_decay, cautious_decay=cautious)
    kept, step_size = muon.move(settings, 4, 5)
    ways = itertools.product(DTYPES, (torch.float32, torch.bfloat16), (0, 3))
    for number, (of_parameter, of_update, gap) in enumerate(ways):
        parameters, updates = _numbers(number, of_parameter), _numbers(number + 1, of_update, gap)
        expected = _clones(parameters)
        for parameter, update in zip(expected, updates, strict=True):
            muon.apply(parameter, update, settings, num_rows=4, num_columns=5)
        multi_tensor.apply(parameters, updates, kept, step_size, cautious=cautious)
        _assert_same(parameters, expected, (of_parameter, of_update, gap))


@pytest.mark.parametrize("transposed", [True, False])
def test_normalised_rows(transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(5, 7, 11, generator=generator).bfloat16()
    moments, factors = torch.rand(5, 11 if transposed else 7, generator=generator), torch.rand(5, generator=generator)
    together = normuon.normalized(updates, moments, factors[:, None, None], 1e-3, transposed=transposed)
    for index in range(5):
        alone = normuon.normalized(updates[index], moments[index], factors[index], 1e-3, transposed=transposed)
        assert torch.equal(together[index], alone)


def test_what_no_rank_has_a_gradient_for_comes_back() -> None:
    tensors = _numbers(0, torch.float32, gap=2)
    before, expected = multi_tensor.in_a_row(tensors), _clones(tensors)
    flags = [torch.tensor(float(index % 2)) for index in range(len(tensors))]
    for index, tensor in enumerate(tensors):
        tensor.fill_(5)
        if index % 2:
            expected[index].fill_(5)
    multi_tensor.restore_absent(tensors, flags, before)
    _assert_same(tensors, expected, "restored")


def test_batches_are_of_equal_settings_dtypes_and_density() -> None:
    dense, other = torch.zeros(2, 3), torch.zeros(4, 4)
    half, gaps = torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, 5)[:, :3]
    found = list(
        batches([("a", (dense, half)), ("b", (dense, half)), ("a", (dense, dense)), ("a", (gaps, half)), ("a", (other, half))])
    )
    assert [settings for settings, _ in found] == ["a", "b", "a", "a"]
    (_, (first, second)), *_ = found
    assert first[0] is dense
    assert first[1] is other
    assert [tensor is half for tensor in second] == [True, True]


@pytest.mark.parametrize("rule", ["sum", "ema"])
@pytest.mark.parametrize("cautious", [True, False])
def test_launches_do_not_grow_with_the_lists(rule: Any, cautious: bool) -> None:
    def launches(repeats: int, dtype: torch.dtype) -> int:
        gradients, momenta, parameters = (_numbers(seed, dtype) * repeats for seed in range(3))
        out = [torch.zeros_like(tensor, dtype=torch.bfloat16) for tensor in gradients]
        with Launches() as counted:
            multi_tensor.prepare(gradients, momenta, out, 0.95, rule, True, commit=False)
            before = multi_tensor.in_a_row(parameters)
            multi_tensor.apply(parameters, out, 0.998, 0.02, cautious=cautious)
            multi_tensor.restore_absent(parameters, [torch.ones(())] * len(parameters), before)
        return counted.total

    for dtype in (torch.float32, torch.bfloat16):
        assert launches(1, dtype) == launches(7, dtype)


def test_the_cpu_goes_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not multi_tensor.uses_multi_tensor(torch.device("cpu"))
    assert multi_tensor.uses_multi_tensor(torch.device("cuda"))
    assert multi_tensor.uses_multi_tensor(torch.device("meta"))
    steps = []
    monkeypatch.setattr(MultiTensorStep, "prepare", lambda *arguments, **options: steps.append(arguments))
    weight = nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.ones(2, 3)
    DualOptimizer([{"params": [weight], "algorithm": "muon"}]).step()
    assert not steps
