"""Parameter groups: what programs may hand over, in which order it is kept, and what they change later."""

from collections import defaultdict
from copy import deepcopy
from typing import Any

import torch
from contract_registry import check
from contract_subjects import Subject, assert_equal, bits, differ, fill, parameters_of, steps, weights


@check()
def groups_keep_order_names_and_identity(subject: Subject) -> None:
    model = subject.model()
    groups = subject.groups(model)
    optimizer = subject.optimizer([dict(group) for group in groups])
    for given, found in zip(groups, optimizer.param_groups, strict=True):
        assert [id(parameter) for parameter in given["params"]] == [id(parameter) for parameter in found["params"]]
        assert list(given["param_names"]) == list(found["param_names"])
    saved = optimizer.state_dict()["param_groups"]
    assert [index for group in saved for index in group["params"]] == list(range(len(parameters_of(optimizer))))
    assert [list(group["param_names"]) for group in saved] == [list(group["param_names"]) for group in groups]


@check()
def groups_that_are_given_are_not_emptied(subject: Subject) -> None:
    model = subject.model()
    groups = subject.groups(model)
    lengths = [len(group["params"]) for group in groups]
    subject.optimizer(groups)
    assert [len(group["params"]) for group in groups] == lengths
    subject.optimizer(groups)


@check()
def every_group_has_every_default(subject: Subject) -> None:
    _, optimizer = subject.make()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer.state, defaultdict)
    assert {"lr", "weight_decay"} <= optimizer.defaults.keys()
    assert optimizer.defaults.keys() & {"momentum", "betas"}, "schedulers that cycle momentum look here"
    for group in optimizer.param_groups:
        assert {"lr", "weight_decay"} <= group.keys()


@check()
def groups_may_come_from_generators(subject: Subject) -> None:
    model = subject.model()
    groups = subject.groups(model)
    lazily = ({**group, "params": (parameter for parameter in group["params"])} for group in groups)
    optimizer, twin = subject.optimizer(lazily), subject.optimizer(subject.groups(subject.model()))
    for one in (optimizer, twin):
        steps(one, 0, 1)
    assert_equal(bits(optimizer), bits(twin))


@check()
def params_may_be_one_tensor(subject: Subject) -> None:
    (tensor,) = subject.tensors((5, 4))
    optimizer = subject.optimizer([subject.group(tensor)])
    assert [id(parameter) for parameter in parameters_of(optimizer)] == [id(tensor)]
    before = weights(optimizer)
    steps(optimizer, 0)
    assert all(differ(before, weights(optimizer)))


@check()
def params_may_be_named_pairs(subject: Subject) -> None:
    first, second = subject.tensors((5, 4), (4, 6))
    optimizer = subject.optimizer([subject.group([("one", first), ("two", second)])])
    assert list(optimizer.param_groups[0]["param_names"]) == ["one", "two"]
    assert [id(parameter) for parameter in parameters_of(optimizer)] == [id(first), id(second)]
    steps(optimizer, 0)


@check()
def an_empty_group_is_kept(subject: Subject) -> None:
    (tensor,) = subject.tensors((5, 4))
    optimizer = subject.optimizer([subject.group([]), subject.group([tensor]), subject.group([], "adamw")])
    steps(optimizer, 0)
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1, 0]
    twin = subject.optimizer([subject.group([]), subject.group(subject.tensors((5, 4))), subject.group([], "adamw")])
    twin.load_state_dict(optimizer.state_dict())


@check()
def a_parameter_without_elements_is_taken(subject: Subject) -> None:
    tensors = subject.tensors((0, 4), (5, 4))
    optimizer = subject.optimizer([subject.group(tensors)])
    before = weights(optimizer)
    steps(optimizer, 0, 1)
    assert all(differ(before, weights(optimizer)))


@check()
def add_param_group_joins_the_next_step(subject: Subject) -> None:
    first, second, third = subject.tensors((5, 4), (4, 6), (3,))
    optimizer = subject.optimizer([subject.group([first])])
    steps(optimizer, 0)
    kept = {key: value for key, value in bits(optimizer).items() if "." in key}
    optimizer.add_param_group(subject.group([second], lr=0.01))
    optimizer.add_param_group(subject.group(third, "adamw"))
    assert optimizer.param_groups[1]["lr"] == 0.01
    assert all("weight_decay" in group for group in optimizer.param_groups)
    found = bits(optimizer)
    assert_equal(kept, {key: found[key] for key in kept})
    before = weights(optimizer)
    steps(optimizer, 1)
    assert all(differ(before, weights(optimizer)))


@check()
def an_added_group_is_saved_and_loaded(subject: Subject) -> None:
    found = []
    for _ in range(2):
        first, second = subject.tensors((5, 4), (4, 6))
        optimizer = subject.optimizer([subject.group([first])])
        optimizer.add_param_group(subject.group([second], lr=0.01))
        found.append(optimizer)
    steps(found[0], 0, 1)
    with torch.no_grad():
        for target, source in zip(parameters_of(found[1]), parameters_of(found[0]), strict=True):
            target.copy_(source)
    found[1].load_state_dict(deepcopy(found[0].state_dict()))
    for optimizer in found:
        steps(optimizer, 2)
    assert_equal(bits(found[0]), bits(found[1]))


@check()
def rates_of_groups_are_read_at_the_step(subject: Subject) -> None:
    first, second = subject.tensors((5, 4), (4, 6))
    optimizer = subject.optimizer([subject.group([first], lr=0.0), subject.group([second])])
    before = weights(optimizer)
    steps(optimizer, 0)
    assert differ(before, weights(optimizer))[1]
    assert torch.equal(before[0], weights(optimizer)[0])
    before = weights(optimizer)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.5, 0.0
    steps(optimizer, 1)
    assert differ(before, weights(optimizer))[0]
    assert torch.equal(before[1], weights(optimizer)[1])


@check()
def decay_of_groups_is_decoupled(subject: Subject) -> None:
    first, second, third = subject.tensors((5, 4), (4, 6), (7,))
    fields: dict[str, Any] = {"lr": 0.125, "weight_decay": 0.5}
    optimizer = subject.optimizer(
        [
            subject.group([first], **fields),
            subject.group([second], lr=0.125, weight_decay=0.0),
            subject.group([third], "adamw", **fields),
        ]
    )
    before = weights(optimizer)
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for old, new, factor in zip(before, weights(optimizer), (0.9375, 1.0, 0.9375), strict=True):
        assert torch.allclose(old * factor, new, rtol=1e-6, atol=0)


@check()
def foreign_keys_of_a_group_are_kept_and_saved(subject: Subject) -> None:
    (tensor,) = subject.tensors((5, 4))
    foreign = {"name": "blocks", "foreach": None, "fused": None, "capturable": False, "differentiable": False}
    optimizer = subject.optimizer([subject.group([tensor], **foreign)])
    steps(optimizer, 0)
    assert foreign.items() <= optimizer.param_groups[0].items()
    assert foreign.items() <= optimizer.state_dict()["param_groups"][0].items()


@check()
def keys_that_a_program_adds_later_are_kept_and_saved(subject: Subject) -> None:
    _, optimizer = subject.make()
    for group in optimizer.param_groups:
        group["tag"] = {"stage": 3}
    steps(optimizer, 0)
    saved = optimizer.state_dict()
    assert all(group["tag"] == {"stage": 3} for group in saved["param_groups"])
    _, twin = subject.make()
    twin.load_state_dict(saved)
    assert all(group["tag"] == {"stage": 3} for group in twin.param_groups)


def _rate_as(subject: Subject, lr: Any) -> dict[str, Any]:
    tensors = subject.tensors((5, 4), (4, 6), (7,))
    groups = [subject.group(tensors[:2], lr=lr), subject.group(tensors[2:], "adamw", lr=lr)]
    optimizer = subject.optimizer(groups)
    steps(optimizer, 0, 1)
    return bits(optimizer)


@check()
def a_tensor_rate_of_a_group_is_its_number(subject: Subject) -> None:
    # A power of two, exact in fp32, so that both rates are the same number.
    expected = _rate_as(subject, 2**-7)
    assert_equal(expected, _rate_as(subject, torch.tensor(2**-7)))
    assert_equal(expected, _rate_as(subject, torch.tensor(2**-7, dtype=torch.float64)))


@check()
def a_tensor_rate_may_be_the_keyword(subject: Subject) -> None:
    found = []
    for lr in (2**-7, torch.tensor(2**-7)):
        _, optimizer = subject.make(lr=lr)
        steps(optimizer, 0, 1)
        found.append(bits(optimizer))
    assert_equal(*found)


@check()
def a_tensor_rate_is_written_in_place_by_a_schedule(subject: Subject) -> None:
    found = []
    for lr in (2**-7, torch.tensor(2**-7)):
        tensors = subject.tensors((5, 4), (7,))
        optimizer = subject.optimizer([subject.group(tensors[:1], lr=lr), subject.group(tensors[1:], "adamw", lr=lr)])
        held = optimizer.param_groups[0]["lr"]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for seed in range(3):
            steps(optimizer, seed)
            scheduler.step()
        assert float(optimizer.param_groups[0]["lr"]) == 2**-10
        if isinstance(lr, torch.Tensor):
            assert optimizer.param_groups[0]["lr"] is held
        found.append(bits(optimizer))
    assert_equal(*found)


@check()
def it_can_be_printed(subject: Subject) -> None:
    _, optimizer = subject.make()
    text = repr(optimizer)
    assert text.startswith(type(optimizer).__name__)
    for number in range(len(optimizer.param_groups)):
        assert f"Parameter Group {number}" in text
    assert "lr: " in text
    steps(optimizer, 0)
    assert "lr: " in repr(optimizer)


@check()
def zero_grad_removes_or_clears(subject: Subject) -> None:
    _, optimizer = subject.make()
    fill(parameters_of(optimizer), 0)
    held = [parameter.grad for parameter in parameters_of(optimizer)]
    optimizer.zero_grad(set_to_none=False)
    for parameter, gradient in zip(parameters_of(optimizer), held, strict=True):
        assert parameter.grad is gradient
        assert not gradient.to_local().any() if subject.mesh is not None else not gradient.any()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters_of(optimizer))
