"""Steps: gradients that are there or not, closures, hooks, and what surrounds a step."""

from typing import Any

import pytest
import torch
from contract_registry import check
from contract_subjects import (
    Subject,
    assert_equal,
    bits,
    closure_for,
    differ,
    fill,
    local,
    parameters_of,
    steps,
    weights,
    with_local,
)
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


@check()
def steps_go_down(subject: Subject) -> None:
    model, optimizer = subject.make()
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 1e-2, 0.0
    closure = closure_for(model, optimizer)
    losses = [float(optimizer.step(closure)) for _ in range(8)]
    assert losses[-1] < losses[0]


@check()
def gradients_are_not_written(subject: Subject) -> None:
    _, optimizer = subject.make()
    fill(parameters_of(optimizer), 0)
    held = [parameter.grad for parameter in parameters_of(optimizer)]
    before = [local(gradient).clone() for gradient in held]
    optimizer.step()
    optimizer.step()
    for parameter, gradient, old in zip(parameters_of(optimizer), held, before, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(local(gradient), old)


@check()
def a_step_without_any_gradient_does_nothing(subject: Subject) -> None:
    _, optimizer = subject.make()
    before = bits(optimizer)
    assert optimizer.step() is None
    assert_equal(before, bits(optimizer))
    steps(optimizer, 0)
    before = bits(optimizer)
    optimizer.zero_grad()
    optimizer.step()
    assert_equal(before, bits(optimizer))


@check()
def a_skipped_step_leaves_no_trace(subject: Subject) -> None:
    found = []
    for skips in (False, True):
        _, optimizer = subject.make()
        for seed in range(3):
            steps(optimizer, seed)
            if skips:
                optimizer.zero_grad()
                optimizer.step()
        found.append(bits(optimizer))
    assert_equal(*found)


@check()
def parameters_without_a_gradient_are_left_alone(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    fill(parameters_of(optimizer), 1)
    absent = range(0, len(parameters_of(optimizer)), 2)
    for position in absent:
        parameters_of(optimizer)[position].grad = None
    before = bits(optimizer)
    optimizer.step()
    after = bits(optimizer)
    for key, value in before.items():
        position = int(key.partition(".")[0])
        if position in absent:
            assert_equal(value, after[key], key)
        elif "." not in key and value.numel():
            assert not torch.equal(value, after[key])


@check()
def zero_gradients_without_decay_move_nothing(subject: Subject) -> None:
    _, optimizer = subject.make()
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    before = weights(optimizer)
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert_equal(before, weights(optimizer))


@check()
def a_closure_is_called_once_with_gradients_on(subject: Subject) -> None:
    model, optimizer = subject.make()
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss: Tensor = model(torch.arange(7))
        loss.backward()
        returned.append(loss)
        return loss

    returned: list[Tensor] = []
    before = weights(optimizer)
    with torch.no_grad():
        assert optimizer.step(closure) is returned[0]
        assert not torch.is_grad_enabled()
    assert optimizer.step(closure) is returned[1]
    assert torch.is_grad_enabled()
    assert calls == [True, True]
    assert any(differ(before, weights(optimizer)))


@check()
def a_closure_may_return_anything(subject: Subject) -> None:
    _, optimizer = subject.make()
    for value in (0.5, None, torch.tensor(2.0), {"loss": 1.0}):
        fill(parameters_of(optimizer), 0)
        assert optimizer.step(lambda value=value: value) is value


@check()
def a_closure_that_fails_changes_nothing(subject: Subject) -> None:
    _, optimizer = subject.make()
    steps(optimizer, 0)
    before = bits(optimizer)

    def closure() -> float:
        raise KeyError("of the program")

    with pytest.raises(KeyError, match="of the program"):
        optimizer.step(closure)
    assert torch.is_grad_enabled()
    assert_equal(before, bits(optimizer))
    steps(optimizer, 1)


@check()
def hooks_of_a_step_run_in_torchs_order(subject: Subject) -> None:
    _, optimizer = subject.make()
    seen: list[str] = []

    def said(word: str) -> Any:
        def hook(found: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
            assert found is optimizer
            assert keywords == {}
            seen.append(word)

        return hook

    handles = [
        optimizer.register_step_post_hook(said("own after")),
        optimizer.register_step_pre_hook(said("own before")),
        register_optimizer_step_post_hook(said("global after")),
        register_optimizer_step_pre_hook(said("global before")),
    ]
    try:
        steps(optimizer, 0)
        assert seen == ["global before", "own before", "own after", "global after"]
        handles[0].remove()
        steps(optimizer, 1)
        assert seen[4:] == ["global before", "own before", "global after"]
    finally:
        for handle in handles:
            handle.remove()
    steps(optimizer, 2)
    assert len(seen) == 7


@check()
def a_hook_before_a_step_may_change_gradients_and_arguments(subject: Subject) -> None:
    _, optimizer = subject.make()
    _, twin = subject.make()
    called: list[int] = []

    def closure() -> float:
        called.append(1)
        return 3.0

    def hook(found: torch.optim.Optimizer, arguments: Any, keywords: Any) -> Any:
        for parameter in parameters_of(found):
            local(parameter.grad).mul_(0.5)
        return (arguments[0], closure), keywords

    optimizer.register_step_pre_hook(hook)
    fill(parameters_of(optimizer), 0)
    fill(parameters_of(twin), 0)
    for parameter in parameters_of(twin):
        local(parameter.grad).mul_(0.5)
    assert optimizer.step() == 3.0
    twin.step()
    assert called == [1]
    assert_equal(bits(optimizer), bits(twin))


@check()
def a_hook_after_a_step_sees_its_result(subject: Subject) -> None:
    _, optimizer = subject.make()
    seen: list[dict[str, Any]] = []
    optimizer.register_step_post_hook(lambda found, arguments, keywords: seen.append(bits(found)))
    steps(optimizer, 0)
    assert_equal(seen[0], bits(optimizer))


@check(on_ranks=False)
def a_step_is_seen_by_the_profiler(subject: Subject) -> None:
    _, optimizer = subject.make()
    with torch.autograd.profiler.profile() as profile:
        steps(optimizer, 0)
        optimizer.zero_grad()
    names = {event.name for event in profile.function_events}
    kind = type(optimizer).__name__
    assert {f"Optimizer.step#{kind}.step", f"Optimizer.zero_grad#{kind}.zero_grad"} <= names


@check(on_ranks=False)
def a_step_may_be_called_from_compiled_code(subject: Subject) -> None:
    if subject.is_control:
        return  # torch's own tests show it, and compiling AdamW takes seconds.
    found = []
    for compiled in (False, True):
        _, optimizer = subject.make()
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for seed in range(2):
            fill(parameters_of(optimizer), seed)
            step()
        found.append(bits(optimizer))
    assert_equal(*found)


@check()
def lists_of_tensors_give_the_result_of_a_loop(subject: Subject) -> None:
    choices: tuple[dict[str, Any], ...] = ({"kernels": "torch"}, {}, {"batch_invariant": False})
    found = []
    for fields in ({"foreach": False}, {"foreach": True}) if subject.is_control else choices:
        _, optimizer = subject.make(**fields)
        steps(optimizer, 0, 1, 2)
        found.append(bits(optimizer))
    if not subject.is_control:
        assert_equal(found[0], found[1])
    for key, value in found[0].items():
        assert torch.allclose(value, found[-1][key], rtol=1e-4, atol=1e-6), key


@check()
def a_gradient_may_be_a_lazy_negative(subject: Subject) -> None:
    found = []
    for lazy in (False, True):
        optimizer = subject.optimizer([subject.group(subject.tensors((12, 8))), subject.group(subject.tensors((12, 9)), "adamw")])
        for seed in range(2):
            fill(parameters_of(optimizer), seed)
            for parameter in parameters_of(optimizer):
                gradient = parameter.grad
                # Private, but what the imaginary part of a conjugate is made with.
                negated = torch._neg_view(local(gradient))
                if not lazy:
                    negated = negated.resolve_neg()
                assert negated.is_neg() == lazy
                assert negated.is_contiguous()
                parameter.grad = negated if subject.mesh is None else with_local(gradient, negated)
            optimizer.step()
        found.append(bits(optimizer))
    assert_equal(*found)


@check(on_ranks=False)
def gradients_may_lie_anywhere_in_memory(subject: Subject) -> None:
    found = []
    for strided in (False, True):
        _, optimizer = subject.make()
        fill(parameters_of(optimizer), 0)
        if strided:
            for parameter in parameters_of(optimizer):
                wide = torch.stack([parameter.grad, torch.full_like(parameter.grad, 7.0)], dim=-1)
                parameter.grad = wide[..., 0]
        optimizer.step()
        found.append(bits(optimizer))
    assert_equal(*found)


@check(on_ranks=False)
def parameters_may_lie_anywhere_in_memory(subject: Subject) -> None:
    found = []
    for strided in (False, True):
        tensors = [tensor.detach() for tensor in subject.tensors((10, 5), (10,))]
        if strided:
            tensors = [torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in tensors]
        matrix, vector = (nn.Parameter(tensor) for tensor in tensors)
        optimizer = subject.optimizer([subject.group([matrix]), subject.group([vector], "adamw")])
        steps(optimizer, 0, 1)
        found.append(weights(optimizer))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


# AdamW takes several dtypes as plain tensors, but not as DTensors.
@check(by_control=False)
def dtypes_may_be_mixed_in_a_group(subject: Subject) -> None:
    both = (torch.float32, torch.bfloat16)
    matrices = [subject.tensors(shape, dtype=dtype)[0] for shape, dtype in zip(((5, 4), (4, 6)), both, strict=True)]
    vectors = [subject.tensors(shape, dtype=dtype)[0] for shape, dtype in zip(((3,), (8,)), both, strict=True)]
    optimizer = subject.optimizer([subject.group(matrices, lr=0.125), subject.group(vectors, "adamw", lr=0.125)])
    before = weights(optimizer)
    steps(optimizer, 0, 1)
    after = weights(optimizer)
    assert all(differ(before, after))
    assert [tensor.dtype for tensor in before] == [tensor.dtype for tensor in after]


@check()
def the_default_dtype_does_not_matter(subject: Subject) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            model = subject.model().float()
            optimizer = subject.optimizer(subject.groups(model))
            with torch.no_grad():
                for parameter in parameters_of(optimizer):
                    local(parameter.detach()).fill_(0.5)
            for seed in range(2):
                for parameter in parameters_of(optimizer):
                    parameter.grad = torch.full_like(parameter, 0.25 + seed)
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        # AdamW's counters follow the default dtype.
        found.append(weights(optimizer))
    assert_equal(*found)


@check()
def gradients_off_and_autocast_do_not_matter(subject: Subject) -> None:
    found = []
    for around in (torch.enable_grad(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        _, optimizer = subject.make()
        with around:
            steps(optimizer, 0, 1)
        found.append(bits(optimizer))
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])
