"""torch.distributed.checkpoint and its state-dict helpers, in the forms that programs ask for."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contract_registry import add_check, check
from contract_subjects import Subject, assert_equal, bits, fill, parameters_of, steps
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

FORMS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "offloaded": {"cpu_offload": True},
}


def _continue_alike(*optimizers: torch.optim.Optimizer) -> None:
    assert_equal(*(bits(optimizer) for optimizer in optimizers))
    for optimizer in optimizers:
        steps(optimizer, 5)
    assert_equal(*(bits(optimizer) for optimizer in optimizers))


def _moves(options: StateDictOptions) -> Callable[[Subject], None]:
    def run(subject: Subject) -> None:
        model, optimizer = subject.make()
        steps(optimizer, 0, 1)
        for group in optimizer.param_groups:
            group["lr"] = 0.25
        twin_model, twin = subject.make()
        set_model_state_dict(twin_model, get_model_state_dict(model))
        saved = deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
        set_optimizer_state_dict(twin_model, twin, saved, options=options)
        assert all(group["lr"] == 0.25 for group in twin.param_groups)
        _continue_alike(optimizer, twin)

    return run


for _form, _fields in FORMS.items():
    add_check(f"state_dict_helpers_move_{_form}_state", _moves(StateDictOptions(**_fields)))


@check()
def state_dict_helpers_move_state_from_rank_0(subject: Subject) -> None:
    if subject.mesh is None:
        return  # They need a process group for it.
    model, optimizer = subject.make()
    steps(optimizer, 0, 1)
    twin_model, twin = subject.make()
    set_model_state_dict(twin_model, get_model_state_dict(model))
    saved = deepcopy(get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(twin_model, twin, saved if dist.get_rank() == 0 else {}, options=options)
    _continue_alike(optimizer, twin)


@check()
def state_dict_helpers_take_model_and_optimizer_together(subject: Subject) -> None:
    model, optimizer = subject.make()
    steps(optimizer, 0, 1)
    twin_model, twin = subject.make()
    of_model, of_optimizer = deepcopy(get_state_dict(model, optimizer))
    set_state_dict(twin_model, twin, model_state_dict=of_model, optim_state_dict=of_optimizer)
    _continue_alike(optimizer, twin)


@check()
def reading_the_state_changes_nothing(subject: Subject) -> None:
    model, optimizer = subject.make()
    for _ in range(2):
        before = weights_and_rates(optimizer)
        get_optimizer_state_dict(model, optimizer)
        assert_equal(before, weights_and_rates(optimizer))
        steps(optimizer, 0)


def weights_and_rates(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = {key: value for key, value in bits(optimizer).items() if "." not in key}
    return {**found, "lr": [group["lr"] for group in optimizer.param_groups]}


@check(by_control=False)
def full_state_loads_into_shards_without_being_told(subject: Subject) -> None:
    model, optimizer = subject.make()
    steps(optimizer, 0, 1)
    twin_model, twin = subject.make()
    set_model_state_dict(twin_model, get_model_state_dict(model))
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    set_optimizer_state_dict(twin_model, twin, full)
    _continue_alike(optimizer, twin)


@check(by_control=False)
def a_plain_state_dict_loads_into_shards(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0, 1)
    saved = optimizer.state_dict()
    whole = {
        position: {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
        for position, state in saved["state"].items()
    }
    _, twin = subject.make()
    with torch.no_grad():
        for target, source in zip(parameters_of(twin), parameters_of(optimizer), strict=True):
            target.copy_(source)
    twin.load_state_dict({**saved, "state": whole})
    _continue_alike(optimizer, twin)


def _stored(options: StateDictOptions) -> Callable[[Subject], None]:
    def run(subject: Subject) -> None:
        model, optimizer = subject.make()
        steps(optimizer, 0, 1)
        alone = {"no_dist": subject.mesh is None}
        saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.save(saved, checkpoint_id=subject.folder, **alone)
        twin_model, twin = subject.make()
        kept = {"model": get_model_state_dict(twin_model), "optimizer": get_optimizer_state_dict(twin_model, twin, options=options)}
        dcp.load(kept, checkpoint_id=subject.folder, **alone)
        set_model_state_dict(twin_model, kept["model"])
        set_optimizer_state_dict(twin_model, twin, kept["optimizer"], options=options)
        _continue_alike(optimizer, twin)

    return run


for _form in ("sharded", "flat"):
    add_check(f"a_stored_checkpoint_continues_{_form}", _stored(StateDictOptions(**FORMS[_form])))


@check()
def frozen_parameters_are_saved_and_loaded(subject: Subject) -> None:
    found = []
    for _ in range(2):
        model, optimizer = subject.make()
        parameters_of(optimizer)[0].requires_grad_(False)
        found.append((model, optimizer))
    (model, optimizer), (twin_model, twin) = found
    steps_of_the_rest(optimizer, 0)
    of_model, of_optimizer = deepcopy(get_state_dict(model, optimizer))
    set_state_dict(twin_model, twin, model_state_dict=of_model, optim_state_dict=of_optimizer)
    for one in (optimizer, twin):
        steps_of_the_rest(one, 1)
    assert_equal(bits(optimizer), bits(twin))


def steps_of_the_rest(optimizer: torch.optim.Optimizer, seed: int) -> None:
    fill([parameter for parameter in parameters_of(optimizer) if parameter.requires_grad], seed)
    optimizer.step()
