"""fp32 masters of bf16 parameters: made, followed and saved like any other state."""

from copy import deepcopy
from typing import Any

import torch
from contract_registry import check
from contract_subjects import Subject, assert_equal, bits, local, parameters_of, steps


def _with_masters(subject: Subject) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return subject.make(torch.bfloat16, master_weights=True)


def _masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [local(optimizer.state[parameter]["master"]) for parameter in parameters_of(optimizer)]


def _widened(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [local(parameter.detach()).float() for parameter in parameters_of(optimizer)]


@check(by_control=False)
def masters_continue_bit_for_bit(subject: Subject) -> None:
    _, optimizer = _with_masters(subject)
    steps(optimizer, 0, 1)
    _, twin = _with_masters(subject)
    with torch.no_grad():
        for target, source in zip(parameters_of(twin), parameters_of(optimizer), strict=True):
            target.copy_(source)
    twin.load_state_dict(deepcopy(optimizer.state_dict()))
    assert_equal(bits(optimizer), bits(twin))
    for one in (optimizer, twin):
        steps(one, 2)
    assert_equal(bits(optimizer), bits(twin))


@check(by_control=False)
def masters_follow_weights_that_others_write(subject: Subject) -> None:
    model, optimizer = _with_masters(subject)
    steps(optimizer, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).fill_(96.0)
    saved: dict[str, Any] = optimizer.state_dict()
    for state in saved["state"].values():
        assert bool((local(state["master"]) == 96.0).all())
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).fill_(-96.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    steps(optimizer, 1)
    assert all(bool((master == -96.0).all()) for master in _masters(optimizer))
    assert all(bool((weight == -96.0).all()) for weight in _widened(optimizer))


@check(by_control=False)
def masters_that_were_not_saved_are_made(subject: Subject) -> None:
    _, without = subject.make(torch.bfloat16)
    steps(without, 0)
    _, optimizer = _with_masters(subject)
    with torch.no_grad():
        for target, source in zip(parameters_of(optimizer), parameters_of(without), strict=True):
            target.copy_(source)
    optimizer.load_state_dict(deepcopy(without.state_dict()))
    assert_equal(_widened(optimizer), _masters(optimizer))
    for group in optimizer.param_groups:
        group["lr"] = 1e-5
    steps(optimizer, 1)
    changed = [
        bool((wide != master).any())
        for wide, master in zip(_widened(optimizer), _masters(optimizer), strict=True)
        if master.numel()
    ]
    assert any(changed), "steps below bf16 are kept in masters"


@check(by_control=False)
def masters_that_were_dropped_are_made(subject: Subject) -> None:
    _, optimizer = _with_masters(subject)
    steps(optimizer, 0)
    for parameter in parameters_of(optimizer):
        del optimizer.state[parameter]["master"]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    steps(optimizer, 1)
    assert_equal(_widened(optimizer), _masters(optimizer))
