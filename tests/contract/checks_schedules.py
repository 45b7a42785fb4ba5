"""Every scheduler of torch: the rates of SGD with the same groups, and a step between any two of them."""

import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from contract_registry import add_check, check
from contract_subjects import Subject, assert_equal, bits, fill, parameters_of, steps
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda found: lr_scheduler.LambdaLR(found, lambda epoch: 1 / (1 + epoch)),
    "MultiplicativeLR": lambda found: lr_scheduler.MultiplicativeLR(found, lambda epoch: 0.5),
    "StepLR": lambda found: lr_scheduler.StepLR(found, 1),
    "MultiStepLR": lambda found: lr_scheduler.MultiStepLR(found, [1, 3]),
    "ConstantLR": lambda found: lr_scheduler.ConstantLR(found, total_iters=2),
    "LinearLR": lambda found: lr_scheduler.LinearLR(found, total_iters=3),
    "ExponentialLR": lambda found: lr_scheduler.ExponentialLR(found, 0.5),
    "PolynomialLR": lambda found: lr_scheduler.PolynomialLR(found, 5, 2.0),
    "CosineAnnealingLR": lambda found: lr_scheduler.CosineAnnealingLR(found, 6),
    "CosineAnnealingWarmRestarts": lambda found: lr_scheduler.CosineAnnealingWarmRestarts(found, 3),
    "CyclicLR": lambda found: lr_scheduler.CyclicLR(found, 1e-4, 1e-2, step_size_up=2),
    "OneCycleLR": lambda found: lr_scheduler.OneCycleLR(found, max_lr=1e-2, total_steps=8),
    "ReduceLROnPlateau": lambda found: lr_scheduler.ReduceLROnPlateau(found, patience=0),
    "SequentialLR": lambda found: lr_scheduler.SequentialLR(
        found, [lr_scheduler.LinearLR(found, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(found, 5)], milestones=[2]
    ),
    "ChainedScheduler": lambda found: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(found, 0.1, total_iters=2), lr_scheduler.ExponentialLR(found, 0.5)]
    ),
    "SWALR": lambda found: SWALR(found, swa_lr=0.05, anneal_epochs=3),
}


def schedulers_of_torch() -> set[str]:
    """Those that this version of torch has."""
    found = {name for name, kind in inspect.getmembers(lr_scheduler, inspect.isclass) if issubclass(kind, LRScheduler)}
    return {name for name in found if not name.startswith("_")} - {"LRScheduler"} | {"SWALR"}


def _reference(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """SGD with the rates of the groups."""
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": float(group["lr"])} for group in optimizer.param_groups]
    return torch.optim.SGD(groups, momentum=0.9)


def _advance(scheduler: Any) -> None:
    scheduler.step(*((1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()))


def _schedules(make: Callable[[Any], Any]) -> Callable[[Subject], None]:
    def run(subject: Subject) -> None:
        model = subject.model()
        optimizer = subject.optimizer(subject.groups(model))
        reference = _reference(optimizer)
        scheduler, expected = make(optimizer), make(reference)
        rates = []
        for epoch in range(5):
            if epoch == 2:
                optimizer, scheduler = _resumed(subject, optimizer, scheduler, make)
            fill(parameters_of(optimizer), epoch)
            optimizer.step()
            reference.step()
            _advance(scheduler)
            _advance(expected)
            found = [float(group["lr"]) for group in optimizer.param_groups]
            assert found == [float(group["lr"]) for group in reference.param_groups], f"epoch {epoch}"
            rates.append(found[0])
        assert len(set(rates)) > 1

    return run


def _resumed(subject: Subject, optimizer: torch.optim.Optimizer, scheduler: Any, make: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Both as a program finds them after it loaded a checkpoint."""
    saved, kept = deepcopy(optimizer.state_dict()), deepcopy(scheduler.state_dict())
    _, fresh = subject.make()
    with torch.no_grad():
        for target, source in zip(parameters_of(fresh), parameters_of(optimizer), strict=True):
            target.copy_(source)
    again = make(fresh)
    again.load_state_dict(kept)
    fresh.load_state_dict(saved)
    assert_equal(bits(optimizer), bits(fresh))
    return fresh, again


for _name, _make in SCHEDULERS.items():
    # They read and write groups only, so one of them will do on ranks: that which writes most fields.
    add_check(f"scheduler_{_name}", _schedules(_make), on_ranks=_name == "OneCycleLR")


@check()
def a_scheduler_that_cycles_momentum_reaches_it(subject: Subject) -> None:
    _, optimizer = subject.make()
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=8)
    seen = set()
    for seed in range(3):
        steps(optimizer, seed)
        group = optimizer.param_groups[0]
        seen.add(float(group["momentum"] if "momentum" in group else group["betas"][0]))
        scheduler.step()
    assert len(seen) == 3
