"""Runs checks under FSDP2 on two gloo ranks, which are started once for many checks."""

import pickle
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from contract_registry import outcome
from contract_subjects import Subject
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from omn_dist.exchange.process_groups import SharedGroups
from omn_dist.optim import optimizer as optimizer_module

WORLD_SIZE = 2
_PATIENCE_S = 10
"""How long a rank waits for the other at the end of a check."""
_BUDGET_S = 330
"""For all checks together."""

Pair = tuple[str, str]
"""A check and a subject."""


def outcomes_on_ranks(wanted: Mapping[str, Sequence[str]], folder: Path) -> dict[str, dict[str, str | None]]:
    """What each check says of each subject, by check: the error of the first rank that has one.

    A check that fails on one rank alone may leave the other in a collective that nobody joins. The ranks are then ended, and
    started anew with the check after it.
    """
    pending = [(name, subject) for name, subjects in wanted.items() for subject in subjects]
    found: dict[Pair, str | None] = {}
    end = time.monotonic() + _BUDGET_S
    while pending and time.monotonic() < end:
        place = folder / str(len(pending))
        place.mkdir()
        lost = ""
        try:
            run_ranks(WORLD_SIZE, _run, pending, place, seconds=max(1.0, end - time.monotonic()))
        except AssertionError as error:
            lost = str(error)
        answers = [_answers(place / f"rank{rank}") for rank in range(WORLD_SIZE)]
        for pair in pending:
            said = [answer[pair] for answer in answers if pair in answer]
            if not all(pair in answer for answer in answers):
                found[pair] = next(filter(None, said), f"the ranks parted ways: {lost}")
                break
            found[pair] = next(filter(None, said), None)
        pending = [pair for pair in pending if pair not in found]
    found |= dict.fromkeys(pending, f"not run within {_BUDGET_S} s")
    return {name: {subject: found[name, subject] for subject in subjects} for name, subjects in wanted.items()}


def _answers(path: Path) -> dict[Pair, str | None]:
    found: dict[Pair, str | None] = {}
    if path.exists():
        with path.open("rb") as file:
            while file.peek(1):
                found |= pickle.load(file)
    return found


def _run(pairs: Sequence[Pair], place: Path) -> None:
    import test_contract  # noqa: F401  # Registers the checks on this rank.

    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    # All optimizers share one process group, as deep copies do. torch keeps groups until the ranks end, and thousands of them
    # would make each further one slower.
    groups = SharedGroups()
    optimizer_module.SharedGroups = lambda replicas: groups  # type: ignore[assignment, misc]
    rank = dist.get_rank()
    # Ranks meet over files and not by a collective: those may be out of step after a check that failed.
    store = dist.FileStore(str(place / "store"), WORLD_SIZE)
    with (place / f"rank{rank}").open("ab", buffering=0) as file:
        for number, (name, subject) in enumerate(pairs):
            error = outcome(name, Subject(subject, place / f"{name}-{subject}", mesh))
            file.write(pickle.dumps({(name, subject): error}))
            store.set(f"{number}.{rank}", "failed" if error else "kept")
            everyone = [f"{number}.{other}" for other in range(WORLD_SIZE)]
            store.wait(everyone, timedelta(seconds=_PATIENCE_S))
            if len({store.get(key) for key in everyone}) > 1:
                raise RuntimeError(f"{name} of {subject}: kept on some ranks only")
