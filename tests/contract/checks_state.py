"""State dicts: what is saved, what loads, and what is refused."""

import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from contract_registry import add_check, check
from contract_subjects import Subject, assert_equal, bits, fill, local, parameters_of, steps, weights
from torch import Tensor

_LATER_FIELDS = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
"""Fields of AdamW's groups that older versions of torch did not have."""
_OWN_FIELDS = ("params", "param_names", "algorithm", "lr")
"""Fields of our groups without which a saved group says nothing."""


def copied(
    subject: Subject, source: torch.optim.Optimizer, dtype: torch.dtype = torch.float32, **fields: Any
) -> torch.optim.Optimizer:
    """A fresh optimizer at the weights of another."""
    _, optimizer = subject.make(dtype, **fields)
    with torch.no_grad():
        for target, parameter in zip(parameters_of(optimizer), parameters_of(source), strict=True):
            local(target.detach()).copy_(local(parameter.detach()))
    return optimizer


def _continues(subject: Subject, through: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A fresh optimizer that loads a state dict steps on with the same bits."""
    _, optimizer = subject.make()
    steps(optimizer, 0, 1, 2)
    twin = copied(subject, optimizer)
    twin.load_state_dict(through(optimizer.state_dict()))
    assert_equal(bits(optimizer), bits(twin))
    for seed in (3, 4):
        for one in (optimizer, twin):
            steps(one, seed)
        assert_equal(bits(optimizer), bits(twin))
    assert_equal(optimizer.state_dict(), twin.state_dict())


def _through_torch_save(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@check()
def a_loaded_state_dict_continues_bit_for_bit(subject: Subject) -> None:
    _continues(subject, deepcopy)


@check()
def a_state_dict_loads_without_a_copy(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    twin = copied(subject, optimizer)
    twin.load_state_dict(optimizer.state_dict())
    assert_equal(bits(optimizer), bits(twin))


@check()
def a_state_dict_may_be_pickled(subject: Subject) -> None:
    _continues(subject, lambda saved: pickle.loads(pickle.dumps(saved)))


@check()
def a_state_dict_loads_with_weights_only(subject: Subject) -> None:
    _continues(subject, _through_torch_save)


@check()
def a_fresh_state_dict_loads(subject: Subject) -> None:
    _, optimizer = subject.make()
    twin = copied(subject, optimizer)
    twin.load_state_dict(deepcopy(optimizer.state_dict()))
    for one in (optimizer, twin):
        steps(one, 0, 1)
    assert_equal(bits(optimizer), bits(twin))


@check()
def state_dicts_are_deterministic(subject: Subject) -> None:
    found = []
    for _ in range(2):
        _, optimizer = subject.make()
        steps(optimizer, 0, 1)
        found.append(optimizer.state_dict())
    assert_equal(*found)


@check()
def loading_does_not_change_what_is_loaded(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    saved = deepcopy(optimizer.state_dict())
    given = deepcopy(saved)
    twin = copied(subject, optimizer)
    twin.load_state_dict(given)
    assert_equal(saved, given)


@check()
def loading_its_own_state_changes_nothing(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    before, saved = bits(optimizer), deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert_equal(before, bits(optimizer))
    assert_equal(saved, optimizer.state_dict())


@check()
def loading_leaves_weights_and_gradients(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    twin = subject.make()[1]
    fill(parameters_of(twin), 5)
    before, held = weights(twin), [parameter.grad for parameter in parameters_of(twin)]
    twin.load_state_dict(optimizer.state_dict())
    assert_equal(before, weights(twin))
    assert all(parameter.grad is gradient for parameter, gradient in zip(parameters_of(twin), held, strict=True))


@check(by_control=False)
def loaded_tensors_are_not_shared(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    saved = optimizer.state_dict()
    before = bits(optimizer)
    twin = copied(subject, optimizer)
    twin.load_state_dict(saved)
    steps(twin, 1)
    assert_equal(before, bits(optimizer))


@check()
def every_stepped_parameter_has_state(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    for parameter in parameters_of(optimizer):
        assert any(isinstance(value, Tensor) for value in optimizer.state[parameter].values())


@check()
def state_exists_from_the_first_step_only(subject: Subject) -> None:
    _, optimizer = subject.make()
    assert not optimizer.state_dict()["state"], "state before the first step"


@check()
def saved_rates_win(subject: Subject) -> None:
    _, optimizer = subject.make()
    for number, group in enumerate(optimizer.param_groups):
        group["lr"], group["weight_decay"] = 0.5 + number, 0.25
    twin = copied(subject, optimizer)
    twin.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in twin.param_groups] == [group["lr"] for group in optimizer.param_groups]
    assert all(group["weight_decay"] == 0.25 for group in twin.param_groups)


# --- saved groups of another form ----------------------------------------------------------------


def _one_group_more(saved: dict[str, Any]) -> None:
    saved["param_groups"].append({**saved["param_groups"][0], "params": [99], "param_names": ["x"]})


def _one_group_less(saved: dict[str, Any]) -> None:
    saved["param_groups"].pop()


def _one_parameter_less(saved: dict[str, Any]) -> None:
    group = saved["param_groups"][0]
    group["params"], group["param_names"] = group["params"][:-1], list(group["param_names"])[:-1]


def _one_parameter_more(saved: dict[str, Any]) -> None:
    group = saved["param_groups"][0]
    group["params"], group["param_names"] = [*group["params"], 99], [*group["param_names"], "x"]


def _refuses(change: Callable[[dict[str, Any]], None], *, with_names: bool) -> Callable[[Subject], None]:
    def run(subject: Subject) -> None:
        _, optimizer = subject.make()
        steps(optimizer, 0)
        saved, before = deepcopy(optimizer.state_dict()), bits(optimizer)
        change(saved)
        if not with_names:
            for group in saved["param_groups"]:
                del group["param_names"]
        kept = deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match="group"):
            optimizer.load_state_dict(saved)
        assert_equal(before, bits(optimizer))
        assert_equal(kept, optimizer.state_dict())
        steps(optimizer, 1)

    return run


for _change in (_one_group_more, _one_group_less, _one_parameter_less, _one_parameter_more):
    for _with_names in (True, False):
        _name = f"a_state_dict_with{_change.__name__}_{'' if _with_names else 'and_no_names_'}is_refused"
        add_check(_name, _refuses(_change, with_names=_with_names))


@check()
def names_do_not_decide_what_loads(subject: Subject) -> None:
    def renamed(saved: dict[str, Any]) -> dict[str, Any]:
        for group in saved["param_groups"]:
            group["param_names"] = [f"module.{name}" for name in group["param_names"]]
        return saved

    _, optimizer = subject.make()
    steps(optimizer, 0)
    copied(subject, optimizer).load_state_dict(renamed(deepcopy(optimizer.state_dict())))


@check()
def a_state_dict_without_names_loads_by_position(subject: Subject) -> None:
    def nameless(saved: dict[str, Any]) -> dict[str, Any]:
        saved = deepcopy(saved)
        for group in saved["param_groups"]:
            del group["param_names"]
        return saved

    _continues(subject, nameless)


@check()
def a_saved_group_may_lack_newer_fields(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    fields = {key for group in optimizer.param_groups for key in group}
    later = [field for field in sorted(fields) if (field in _LATER_FIELDS if subject.is_control else field not in _OWN_FIELDS)]
    saved, twin = deepcopy(optimizer.state_dict()), copied(subject, optimizer)
    for group in saved["param_groups"]:
        for field in later:
            group.pop(field, None)
    twin.load_state_dict(saved)
    for one in (optimizer, twin):
        steps(one, 1)
    assert_equal(bits(optimizer), bits(twin))
    assert [group.keys() for group in twin.param_groups] == [group.keys() for group in optimizer.param_groups] or subject.is_control


@check()
def counters_may_be_saved_as_numbers(subject: Subject) -> None:
    def as_numbers(saved: dict[str, Any]) -> dict[str, Any]:
        saved = deepcopy(saved)
        for state in saved["state"].values():
            state |= {
                key: value.item()
                for key, value in state.items()
                if isinstance(value, Tensor) and not value.ndim and key != "master"
            }
        return saved

    if not subject.is_control:
        _continues(subject, as_numbers)
        return
    _, optimizer = subject.make()
    steps(optimizer, 0)
    optimizer.load_state_dict(as_numbers(optimizer.state_dict()))
    steps(optimizer, 1)


@check()
def state_of_unknown_parameters_is_no_error(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    saved = deepcopy(optimizer.state_dict())
    saved["state"]["of the program"] = {"seen": 3}
    twin = copied(subject, optimizer)
    twin.load_state_dict(saved)
    for one in (optimizer, twin):
        steps(one, 1)
    assert_equal(bits(optimizer), bits(twin))


@check()
def state_that_was_not_saved_is_made(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    saved, twin, fresh = deepcopy(optimizer.state_dict()), copied(subject, optimizer), copied(subject, optimizer)
    del saved["state"][0]
    twin.load_state_dict(saved)
    for one in (twin, fresh):
        steps(one, 1)
    assert torch.equal(weights(twin)[0], weights(fresh)[0])
    assert_equal({key: value for key, value in bits(twin).items() if key.startswith("0.")}, _state_of(fresh, 0))


def _state_of(optimizer: torch.optim.Optimizer, position: int) -> dict[str, Any]:
    return {key: value for key, value in bits(optimizer).items() if key.startswith(f"{position}.")}


@check()
def state_that_was_cleared_is_made(subject: Subject) -> None:
    clearings: list[Callable[[torch.optim.Optimizer], None]] = [
        lambda optimizer: optimizer.state.clear(),
        lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    ]
    for clear in clearings:
        _, optimizer = subject.make()
        steps(optimizer, 0)
        fresh = copied(subject, optimizer)
        clear(optimizer)
        for one in (optimizer, fresh):
            steps(one, 1, 2)
        assert_equal(bits(fresh), bits(optimizer))


@check()
def state_of_one_parameter_may_be_dropped(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    fresh = copied(subject, optimizer)
    del optimizer.state[parameters_of(optimizer)[0]]
    for one in (optimizer, fresh):
        steps(one, 1)
    assert_equal(_state_of(fresh, 0), _state_of(optimizer, 0))


@check(by_control=False)
def foreign_state_is_refused_by_name(subject: Subject) -> None:
    model, optimizer = subject.make()
    foreign = torch.optim.AdamW(model.parameters())
    fill(model.parameters(), 0)
    foreign.step()
    saved, before = deepcopy(optimizer.state_dict()), bits(optimizer)
    saved["state"][0] = foreign.state[parameters_of(optimizer)[0]]
    with pytest.raises(ValueError, match=r"weight.*exp_avg"):
        optimizer.load_state_dict(saved)
    assert_equal(before, bits(optimizer))


@check(by_control=False)
def state_of_another_shape_is_refused_by_name(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    before = bits(optimizer)
    for position, key in ((0, "momentum_buffer"), (len(parameters_of(optimizer)) - 1, "exp_avg")):
        saved = deepcopy(optimizer.state_dict())
        saved["state"][position][key] = saved["state"][position][key][:1]
        with pytest.raises(ValueError, match=key):
            optimizer.load_state_dict(saved)
        assert_equal(before, bits(optimizer))
