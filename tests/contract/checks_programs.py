"""What programs do around an optimizer: copies, pickles, clipping, loss scaling, averages, freezing, subclasses."""

import pickle
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from contract_registry import check
from contract_subjects import Subject, assert_equal, bits, differ, fill, local, parameters_of, steps, tokens, weights
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@check()
def a_deep_copy_steps_alike_and_apart(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    twin = deepcopy(optimizer)
    assert_equal(bits(optimizer), bits(twin))
    for one in (optimizer, twin):
        steps(one, 1)
    assert_equal(bits(optimizer), bits(twin))
    before = bits(optimizer)
    steps(twin, 2)
    assert_equal(before, bits(optimizer))


@check()
def a_deep_copy_has_every_public_attribute(subject: Subject) -> None:
    _, optimizer = subject.make()

    def public(found: Any) -> set[str]:
        return {name for name in vars(found) if not name.startswith("_")}

    assert public(deepcopy(optimizer)) == public(optimizer)


@check(on_ranks=False)
def model_and_optimizer_are_copied_together(subject: Subject) -> None:
    model, optimizer = subject.make()
    steps(optimizer, 0)
    for other, twin in (deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        assert {id(parameter) for parameter in other.parameters()} == {id(parameter) for parameter in parameters_of(twin)}
        assert_equal(bits(optimizer), bits(twin))
        fill(parameters_of(twin), 1)
        twin.step()


@check(on_ranks=False)
def it_may_be_pickled(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    twin = pickle.loads(pickle.dumps(optimizer))
    assert_equal(bits(optimizer), bits(twin))
    for one in (optimizer, twin):
        steps(one, 1)
    assert_equal(bits(optimizer), bits(twin))


@check()
def gradients_may_be_clipped(subject: Subject) -> None:
    found = []
    for clips in (True, False):
        _, optimizer = subject.make()
        steps(optimizer, 0)
        fill(parameters_of(optimizer), 1)
        if clips:
            torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), 0.5)
            factors = [local(parameter.grad).clone() for parameter in parameters_of(optimizer)]
        else:
            for parameter, gradient in zip(parameters_of(optimizer), factors, strict=True):
                local(parameter.grad).copy_(gradient)
        optimizer.step()
        found.append(bits(optimizer))
    assert_equal(*found)


@check()
def losses_may_be_scaled(subject: Subject) -> None:
    found = []
    for scales in (False, True):
        model, optimizer = subject.make()
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=scales)
        for seed in range(2):
            optimizer.zero_grad()
            scaler.scale(model(tokens(seed))).backward()
            scaler.step(optimizer)
            scaler.update()
        before = bits(optimizer)
        if scales:
            fill(parameters_of(optimizer), 0)
            for parameter in parameters_of(optimizer):
                local(parameter.grad).fill_(torch.inf)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
            assert_equal(before, bits(optimizer))
            assert scaler.get_scale() == 8.0
        found.append(before)
    assert_equal(*found)


def _swapped_in_and_out(model: torch.nn.Module, averages: Iterable[Tensor]) -> None:
    """As around an evaluation at other weights."""
    held = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, average in zip(model.parameters(), averages, strict=True):
            parameter.copy_(average)
        for parameter, old in zip(model.parameters(), held, strict=True):
            parameter.copy_(old)


@check(on_ranks=False)
def an_averaged_model_may_be_swapped_in(subject: Subject) -> None:
    found = []
    for swaps in (False, True):
        model, optimizer = subject.make()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for seed in range(3):
            steps(optimizer, seed)
            average.update_parameters(model)
            if swaps:
                _swapped_in_and_out(model, average.module.parameters())
        found.append(bits(optimizer))
    assert_equal(*found)


@check()
def averages_of_weights_may_be_swapped_in(subject: Subject) -> None:
    found = []
    for swaps in (False, True):
        model, optimizer = subject.make()
        averages = [parameter.detach().clone() for parameter in model.parameters()]
        for seed in range(2):
            steps(optimizer, seed)
            torch._foreach_lerp_(averages, [parameter.detach() for parameter in model.parameters()], 0.5)
            if swaps:
                _swapped_in_and_out(model, averages)
        found.append(bits(optimizer))
    assert_equal(*found)


@check()
def weights_may_be_written_between_steps(subject: Subject) -> None:
    ways: list[Callable[[torch.nn.Module, dict[str, Any]], Any]] = [
        lambda model, saved: model.load_state_dict(saved),
        lambda model, saved: [local(p.detach()).copy_(local(saved[name])) for name, p in model.named_parameters()],
    ]
    for write in ways:
        model, optimizer = subject.make()
        steps(optimizer, 0)
        saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
        twin_model, twin = subject.make()
        twin.load_state_dict(deepcopy(optimizer.state_dict()))
        write(twin_model, saved)
        for one in (optimizer, twin):
            steps(one, 1)
        assert_equal(bits(optimizer), bits(twin))


@check()
def parameters_may_be_frozen_for_a_while(subject: Subject) -> None:
    model, optimizer = subject.make()
    steps(optimizer, 0)
    frozen = parameters_of(optimizer)[0]
    frozen.requires_grad_(False)
    optimizer.zero_grad()
    before = bits(optimizer)
    model(tokens()).backward()
    assert frozen.grad is None
    optimizer.step()
    after = bits(optimizer)
    for key, value in before.items():
        if key.partition(".")[0] == "0":
            assert_equal(value, after[key], key)
    frozen.requires_grad_(True)
    steps(optimizer, 1)
    assert not frozen.numel() or differ([before["0"]], [bits(optimizer)["0"]])[0]


@check()
def two_optimizers_may_share_a_model(subject: Subject) -> None:
    _, whole = subject.make()
    groups = subject.groups(subject.model())
    apart = [subject.optimizer([group]) for group in groups]
    steps(whole, 0)
    fill([parameter for one in apart for parameter in parameters_of(one)], 0)
    for one in apart:
        one.step()
    assert_equal(weights(whole), [weight for one in apart for weight in weights(one)])


@check()
def a_trial_may_be_taken_back(subject: Subject) -> None:
    model, optimizer = subject.make()
    steps(optimizer, 0)
    kept, saved = {name: value.clone() for name, value in model.state_dict().items()}, deepcopy(optimizer.state_dict())
    before = bits(optimizer)
    steps(optimizer, 1, 2)
    model.load_state_dict(kept)
    optimizer.load_state_dict(saved)
    assert_equal(before, bits(optimizer))


@check()
def gradients_may_be_accumulated(subject: Subject) -> None:
    model, optimizer = subject.make()
    before = weights(optimizer)
    for seed in range(3):
        (model(tokens(seed)) / 3).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert any(differ(before, weights(optimizer)))


@check()
def it_may_be_subclassed(subject: Subject) -> None:
    _, optimizer = subject.make()
    kind = type(optimizer)

    class Counting(kind):  # type: ignore[misc, valid-type]
        """Counts its steps."""

        def step(self, closure: Any = None) -> Any:
            self.num_steps = getattr(self, "num_steps", 0) + 1
            return super().step(closure)

    fields = {} if subject.is_control else {"preset": subject.name}
    own = Counting(subject.groups(subject.model()), **fields)
    for one in (optimizer, own):
        steps(one, 0, 1)
    assert own.num_steps == 2
    assert_equal(bits(optimizer), bits(own))
