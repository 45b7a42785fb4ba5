"""Formulas on lists: bit for bit those one by one, in a fixed number of launches."""

import itertools
from typing import Any

import one_by_one
import pytest
import torch
from launches import Launches
from torch import Tensor, nn

from omn_dist import DualOptimizer
from omn_dist.algorithms import lists
from omn_dist.algorithms.lists import batches, in_a_row, restore_absent
from omn_dist.algorithms.momentum import update_momenta, write_directions
from omn_dist.algorithms.updates import apply_updates
from omn_dist.optim.rules import normuon
from omn_dist.optim.rules.muon import Muon

SHAPES = ((3, 5), (1, 16), (16, 1), (7, 203), (3, 5))
SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-45, 3e38, 1.00390625, 1.01171875)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _numbers(seed: int, dtype: torch.dtype, gap: int = 0) -> list[Tensor]:
    """Regions of many magnitudes, with special numbers, and ``gap`` columns between their rows."""
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


@pytest.fixture(params=["whole lists", "blocks", "cut blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How formulas take their lists: as on a GPU, or as on a CPU, with one block or several."""
    if request.param == "whole lists":
        monkeypatch.setattr(lists, "uses_multi_tensor", lambda device: True)
    elif request.param == "cut blocks":
        monkeypatch.setattr(lists, "_BLOCK_ELEMENTS", 7)
    return str(request.param)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", ["sum", "ema"])
def test_directions_and_momenta(rule: Any, nesterov: bool, out_dtype: torch.dtype, way: str) -> None:
    ways = itertools.product(DTYPES, DTYPES, (False, True), (0, 3), (0.95, 0.3, 0.0, 1.0))
    for number, (of_gradient, of_momentum, commit, gap, coefficient) in enumerate(ways):
        gradients, momenta = _numbers(number, of_gradient, gap), _numbers(number + 1, of_momentum)
        out = [torch.zeros_like(tensor, dtype=out_dtype) for tensor in gradients]
        before, kept, expected = _clones(gradients), _clones(momenta), _clones(out)
        for tensors in zip(gradients, kept, expected, strict=True):
            one_by_one.write_direction(*tensors, coefficient, rule, nesterov, commit=commit)
        write_directions(gradients, momenta, out, coefficient, rule, nesterov, commit=commit)
        _assert_same(out, expected, (of_gradient, of_momentum, commit, gap, coefficient))
        _assert_same(momenta, kept, (of_gradient, of_momentum, commit, gap, coefficient))
        _assert_same(gradients, before, "a gradient changed")
        if not commit:
            kept = [one_by_one.next_momentum(*pair, coefficient, rule) for pair in zip(gradients, kept, strict=True)]
            update_momenta(gradients, momenta, coefficient, rule)
            _assert_same(momenta, kept, (of_gradient, of_momentum, gap, coefficient))


@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1, 70.0])
def test_updates(weight_decay: float, cautious: bool, way: str) -> None:
    kept, step_size = 1 - 0.02 * weight_decay, 0.02
    ways = itertools.product(DTYPES, (torch.float32, torch.bfloat16), (0, 3))
    for number, (of_parameter, of_update, gap) in enumerate(ways):
        parameters, updates = _numbers(number, of_parameter), _numbers(number + 1, of_update, gap)
        expected = _clones(parameters)
        for pair in zip(expected, updates, strict=True):
            one_by_one.apply_update(*pair, kept, step_size, cautious=cautious)
        apply_updates(parameters, updates, kept, step_size, cautious=cautious)
        _assert_same(parameters, expected, (of_parameter, of_update, gap))


def test_an_unknown_rule_is_refused() -> None:
    tensors = _numbers(0, torch.float32)
    with pytest.raises(ValueError, match="unknown momentum rule 'emma'; did you mean 'ema'"):
        update_momenta(tensors, tensors, 0.9, "emma")  # type: ignore[arg-type]


def test_empty_lists_are_no_work() -> None:
    write_directions([], [], [], 0.9, "ema", True, commit=True)
    apply_updates([], [], 1.0, 0.1, cautious=True)


def test_blocks_stay_in_a_cache_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(7, 100), torch.zeros(0, 5), torch.zeros(3, 0), torch.zeros(1, 10**6)]
    monkeypatch.setattr(lists, "_BLOCK_ELEMENTS", 300)
    found = [(one.shape, other.shape) for (one,), (other,) in lists.blocks(tensors, tensors)]
    assert [one for one, _ in found] == [(3, 100), (3, 100), (1, 100), (0, 5), (3, 0), (1, 10**6)]
    assert all(one == other for one, other in found)
    monkeypatch.setattr(lists, "uses_multi_tensor", lambda device: True)
    ((whole,),) = lists.blocks(tensors)
    assert whole is tensors


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
    before, expected = in_a_row(tensors), _clones(tensors)
    flags = [torch.tensor(float(index % 2)) for index in range(len(tensors))]
    for index, tensor in enumerate(tensors):
        tensor.fill_(5)
        if index % 2:
            expected[index].fill_(5)
    restore_absent(tensors, flags, before)
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
def test_launches_do_not_grow_with_the_lists(rule: Any, cautious: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "uses_multi_tensor", lambda device: True)

    def launches(repeats: int, dtype: torch.dtype) -> int:
        gradients, momenta, parameters = (_numbers(seed, dtype) * repeats for seed in range(3))
        out = [torch.zeros_like(tensor, dtype=torch.bfloat16) for tensor in gradients]
        with Launches() as counted:
            write_directions(gradients, momenta, out, 0.95, rule, True, commit=False)
            before = in_a_row(parameters)
            apply_updates(parameters, out, 0.998, 0.02, cautious=cautious)
            restore_absent(parameters, [torch.ones(())] * len(parameters), before)
        return counted.total

    for dtype in (torch.float32, torch.bfloat16):
        assert launches(1, dtype) == launches(7, dtype)


def test_the_cpu_goes_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not lists.uses_multi_tensor(torch.device("cpu"))
    assert lists.uses_multi_tensor(torch.device("cuda"))
    assert lists.uses_multi_tensor(torch.device("meta"))
    lengths = []

    def record(self: Muon, regions: Any, *rest: Any, commit: bool) -> None:
        lengths.append(len(regions))

    monkeypatch.setattr(Muon, "prepare", record)
    parameters = [nn.Parameter(torch.ones(3, 4)) for _ in range(2)]
    for together in (False, True):
        monkeypatch.setattr(lists, "uses_multi_tensor", lambda device, together=together: together)
        optimizer = DualOptimizer([{"params": parameters, "algorithm": "muon"}], preset="omn")
        for parameter in parameters:
            parameter.grad = torch.ones(3, 4)
        optimizer.step()
    assert lengths == [1, 1, 2]
