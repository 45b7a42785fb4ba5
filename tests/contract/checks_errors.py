"""What is refused as torch's optimizers refuse it, and what torch's take and DualOptimizer cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract_registry import add_check, check
from contract_subjects import Subject, assert_equal, bits, fill, parameters_of, steps
from torch import nn


def _refuses(name: str, error: type[Exception] | tuple[type[Exception], ...], make: Callable[[Subject], Any]) -> None:
    def run(subject: Subject) -> None:
        with pytest.raises(error) as caught:
            make(subject)
        assert str(caught.value)

    add_check(name, run)


def _two(subject: Subject) -> list[nn.Parameter]:
    return subject.tensors((5, 4), (4, 6))


def _twice(subject: Subject) -> Any:
    (tensor,) = subject.tensors((5, 4))
    return subject.optimizer([subject.group([tensor]), subject.group([tensor])])


def _added_twice(subject: Subject) -> None:
    (tensor,) = subject.tensors((5, 4))
    subject.optimizer([subject.group([tensor])]).add_param_group(subject.group([tensor]))


def _half_named(subject: Subject) -> Any:
    first, second = _two(subject)
    return subject.optimizer([subject.group([("one", first), second])])


def _named_group_beside_unnamed(subject: Subject) -> Any:
    first, second = _two(subject)
    return subject.optimizer([subject.group([first]), subject.group([("two", second)])])


def _keyword(**fields: Any) -> Callable[[Subject], Any]:
    return lambda subject: subject.optimizer(
        [subject.group(_two(subject)), subject.group(subject.tensors((3,)), "adamw")], **fields
    )


_refuses("a_bare_tensor_is_refused", TypeError, lambda subject: subject.optimizer(_two(subject)[0]))
_refuses("no_parameters_are_refused", ValueError, lambda subject: subject.optimizer([]))
_refuses("a_set_of_parameters_is_refused", TypeError, lambda subject: subject.optimizer([subject.group(set(_two(subject)))]))
_refuses("a_parameter_in_two_groups_is_refused", ValueError, _twice)
_refuses("a_parameter_added_twice_is_refused", ValueError, _added_twice)
_refuses("what_is_no_tensor_is_refused", TypeError, lambda subject: subject.optimizer([subject.group([[1.0, 2.0]])]))
_refuses("a_number_among_tensors_is_refused", TypeError, lambda subject: subject.optimizer([subject.group([*_two(subject), 3])]))
_refuses(
    "a_tensor_with_a_history_is_refused", ValueError, lambda subject: subject.optimizer([subject.group([_two(subject)[0] * 2])])
)
_refuses("a_group_without_params_is_refused", (KeyError, ValueError), lambda subject: subject.optimizer([{"algorithm": "muon"}]))
_refuses("half_named_parameters_are_refused", ValueError, _half_named)
_refuses("a_named_group_beside_an_unnamed_one_is_refused", ValueError, _named_group_beside_unnamed)
_refuses("a_negative_rate_is_refused", ValueError, _keyword(lr=-1e-3))
_refuses("a_negative_decay_is_refused", ValueError, _keyword(weight_decay=-1.0))
_refuses("a_negative_epsilon_is_refused", ValueError, _keyword(eps=-1e-8))
_refuses("a_beta_of_one_is_refused", ValueError, _keyword(betas=(1.0, 0.9)))
_refuses("betas_of_two_kinds_are_refused", ValueError, _keyword(betas=(0.9, torch.tensor(0.99))))
_refuses("a_rate_of_two_elements_is_refused", ValueError, _keyword(lr=torch.tensor([1e-3, 1e-3])))
_refuses("an_unknown_keyword_is_refused", (TypeError, ValueError), _keyword(learning_rate=1e-3))


@check()
def a_group_that_is_no_dictionary_is_refused(subject: Subject) -> None:
    _, optimizer = subject.make()
    with pytest.raises(TypeError):
        optimizer.add_param_group(_two(subject))  # type: ignore[arg-type]


@check()
def a_refused_group_leaves_the_optimizer_as_it_was(subject: Subject) -> None:
    first, second = _two(subject)
    optimizer = subject.optimizer([subject.group([first])])
    before = bits(optimizer)
    for wrong in ([first], [second * 2], {second}, ["x"]):
        with pytest.raises((TypeError, ValueError)):
            optimizer.add_param_group(subject.group(wrong))
    assert len(optimizer.param_groups) == 1
    assert_equal(before, bits(optimizer))
    steps(optimizer, 0)


@check(on_ranks=False)
def duplicates_in_a_group_are_told(subject: Subject) -> None:
    (tensor,) = subject.tensors((5, 4))
    with pytest.warns(UserWarning, match="duplicate"):
        subject.optimizer([subject.group([tensor, tensor])])


@check()
def plain_parameters_are_taken(subject: Subject) -> None:
    steps(subject.optimizer(_two(subject)), 0)


@check()
def named_parameters_are_taken(subject: Subject) -> None:
    steps(subject.optimizer(subject.model().named_parameters()), 0)


@check()
def groups_without_an_algorithm_are_taken(subject: Subject) -> None:
    steps(subject.optimizer([{"params": _two(subject)}]), 0)


@check(on_ranks=False)
def complex_parameters_are_taken(subject: Subject) -> None:
    tensor = nn.Parameter(torch.ones(5, 4, dtype=torch.complex64))
    optimizer = subject.optimizer([subject.group([tensor], "adamw")])
    tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    assert bool((tensor.detach() != 1).all())


@check(on_ranks=False)
def sparse_gradients_are_refused(subject: Subject) -> None:
    matrix, table = subject.tensors((5, 4), (6, 4))
    optimizer = subject.optimizer([subject.group([matrix]), subject.group([table], "adamw")])
    fill([matrix], 0)
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 4), (6, 4), check_invariants=False)
    with pytest.raises((RuntimeError, ValueError), match="sparse"):
        optimizer.step()
    table.grad = None


@check()
def maximize_goes_the_other_way(subject: Subject) -> None:
    found = []
    for fields in ({"maximize": False}, {"maximize": True}):
        tensors = subject.tensors((5, 4), (7,))
        optimizer = subject.optimizer(
            [
                subject.group(tensors[:1], weight_decay=0.0, **fields),
                subject.group(tensors[1:], "adamw", weight_decay=0.0, **fields),
            ]
        )
        before = [parameter.detach().clone() for parameter in parameters_of(optimizer)]
        steps(optimizer, 0)
        found.append([parameter.detach() - old for parameter, old in zip(parameters_of(optimizer), before, strict=True)])
    for down, up in zip(*found, strict=True):
        assert bool((down + up).abs().max() < 1e-6)


@check()
def amsgrad_keeps_the_largest_moment(subject: Subject) -> None:
    optimizer = subject.optimizer([subject.group(subject.tensors((7,)), "adamw", amsgrad=True)])
    steps(optimizer, 0)
    assert "max_exp_avg_sq" in optimizer.state[parameters_of(optimizer)[0]]


@check(on_ranks=False)
def a_differentiable_step_has_a_gradient(subject: Subject) -> None:
    rate = torch.tensor(0.1, requires_grad=True)
    tensor = torch.ones(5, 4, requires_grad=True)
    inner = tensor.clone()
    optimizer = subject.optimizer(
        [subject.group([inner], "adamw", differentiable=True, lr=rate)], **({"differentiable": True} if subject.is_control else {})
    )
    inner.grad = torch.ones(5, 4)
    optimizer.step()
    inner.sum().backward()
    assert rate.grad is not None
