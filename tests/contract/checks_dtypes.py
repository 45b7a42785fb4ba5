"""State and parameters in other dtypes: loaded so, or cast in between."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from checks_state import copied
from contract_registry import add_check, check
from contract_subjects import Subject, assert_equal, bits, local, parameters_of, steps, weights
from torch import Tensor


def _cast(saved: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    saved = deepcopy(saved)
    for state in saved["state"].values():
        state |= {key: value.to(dtype) for key, value in state.items() if isinstance(value, Tensor) and value.ndim}
    return saved


def _sound(optimizer: torch.optim.Optimizer) -> None:
    before = weights(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.125
    steps(optimizer, 7)
    for old, new in zip(before, weights(optimizer), strict=True):
        assert bool(new.isfinite().all())
        assert not old.numel() or not torch.equal(old, new)


@check()
def narrower_state_loads_and_is_widened(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0, 1)
    twin = copied(subject, optimizer)
    saved = _cast(optimizer.state_dict(), torch.bfloat16)
    twin.load_state_dict(saved)
    for position, parameter in enumerate(parameters_of(twin)):
        for key, value in saved["state"][position].items():
            found = twin.state[parameter][key]
            assert found.dtype == torch.float32
            assert torch.equal(local(found), local(value).float())
    _sound(twin)


@check()
def wider_state_loads_into_narrower_parameters(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0, 1)
    twin = copied(subject, optimizer, torch.bfloat16)
    twin.load_state_dict(deepcopy(optimizer.state_dict()))
    _sound(twin)


@check(by_control=False)
def wider_state_keeps_its_bits(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0, 1)
    twin = copied(subject, optimizer, torch.bfloat16)
    twin.load_state_dict(deepcopy(optimizer.state_dict()))
    for one, other in zip(parameters_of(optimizer), parameters_of(twin), strict=True):
        assert_equal(dict(optimizer.state[one]), dict(twin.state[other]))


@check()
def half_precision_continues_bit_for_bit(subject: Subject) -> None:
    _, optimizer = subject.make(torch.bfloat16)
    steps(optimizer, 0, 1)
    twin = copied(subject, optimizer, torch.bfloat16)
    twin.load_state_dict(deepcopy(optimizer.state_dict()))
    for one in (optimizer, twin):
        steps(one, 2)
    assert_equal(bits(optimizer), bits(twin))


def _casts(first: torch.dtype, second: torch.dtype, *, stepped: bool) -> Callable[[Subject], None]:
    def run(subject: Subject) -> None:
        model, optimizer = subject.make(first)
        if stepped:
            steps(optimizer, 0)
        optimizer.zero_grad()
        model.to(second)
        assert all(parameter.dtype == second for parameter in model.parameters())
        _sound(optimizer)
        _sound(optimizer)

    return run


for _first, _second in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
    for _stepped in (False, True):
        _name = f"a_model_cast_to_{str(_second).removeprefix('torch.')}_{'after' if _stepped else 'before'}_steps_is_stepped"
        # AdamW has no state before its first step, and cannot step with state of another dtype.
        add_check(_name, _casts(_first, _second, stepped=_stepped), by_control=not _stepped)
