"""The list of checks, and how one of them is run on one subject."""

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from contract_subjects import Subject


@dataclass(frozen=True)
class Check:
    """One promise of torch's optimizers as a function that raises where a subject breaks it."""

    run: Callable[[Subject], None]
    on_ranks: bool
    """Whether it also runs under FSDP2."""
    by_control: bool
    """Whether torch's AdamW keeps the promise too; the others are promises of DualOptimizer alone."""


CHECKS: dict[str, Check] = {}


def check(*, on_ranks: bool = True, by_control: bool = True) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    def add(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
        add_check(function.__name__, function, on_ranks=on_ranks, by_control=by_control)
        return function

    return add


def add_check(name: str, function: Callable[[Subject], None], *, on_ranks: bool = True, by_control: bool = True) -> None:
    assert name not in CHECKS, f"two checks are called {name}"
    CHECKS[name] = Check(function, on_ranks, by_control)


def outcome(name: str, subject: Subject) -> str | None:
    """``None`` for a promise that is kept; otherwise the error, its type and message in the first line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CHECKS[name].run(subject)
    except (Exception, pytest.fail.Exception) as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-8)}"
    return None
