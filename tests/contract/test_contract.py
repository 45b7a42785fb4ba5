"""The contract of torch's optimizers, held by every preset: plain in one process, and under FSDP2 on two gloo ranks.

torch tests all its optimizers by one list of promises (``test/test_optim.py``): what parameter groups may look like, what a
state dict holds and which of them load, what closures and hooks see, which mistakes are refused and how. Programs rely on that
list whatever the optimizer is. Here it is written anew as checks, small functions that raise where a promise is broken
(``checks_*.py``), with schedulers, copies, loss scaling and torch's checkpoint helpers added.

- ``contract_subjects.py`` makes the optimizer for a preset, plain or sharded, and torch's AdamW, the *control*: it has to pass
  every check that is about torch's contract, so no check asks for more than torch gives.
- ``contract_registry.py`` is the list of checks and runs one of them on one subject.
- ``contract_deviations.py`` has each promise that is not kept on purpose, with its reason. A listed deviation must still
  deviate, on every preset and in the same way, so the table cannot go stale; an unlisted one fails here.
- ``contract_ranks.py`` runs checks on ranks: once for all of them.

torch's own inputs (``torch.testing._internal.common_optimizers``) are not imported: that module is private and needs packages
that torch does not install.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import checks_checkpoints  # noqa: F401
import checks_dtypes  # noqa: F401
import checks_errors  # noqa: F401
import checks_groups  # noqa: F401
import checks_hooks  # noqa: F401
import checks_masters  # noqa: F401
import checks_programs  # noqa: F401
import checks_state  # noqa: F401
import checks_steps  # noqa: F401
import pytest
import torch
from checks_schedules import SCHEDULERS, schedulers_of_torch
from contract_deviations import DEVIATIONS
from contract_ranks import outcomes_on_ranks
from contract_registry import CHECKS, outcome
from contract_subjects import CONTROL, SUBJECTS, Subject

Outcomes = Mapping[str, str | None]
"""What a check said of each subject: ``None``, or the error."""


def _judge(name: str, outcomes: Outcomes) -> None:
    control = outcomes.get(CONTROL)
    assert control is None, f"{CONTROL} does not keep it, so the check asks for too much: {control}"
    broken = {subject: error for subject, error in outcomes.items() if error is not None}
    if name not in DEVIATIONS:
        assert not broken, f"broken by {len(broken)} of {len(outcomes)}: {list(broken)}\n" + next(iter(broken.values()))
        return
    kept = [subject for subject in outcomes if subject not in broken and subject != CONTROL]
    assert not kept, f"listed as a deviation, but kept by {kept}: remove it from the table"
    for subject, error in broken.items():
        first_line = error.partition("\n")[0]
        assert re.search(DEVIATIONS[name].seen, first_line), f"{subject} deviates in another way than listed:\n{error}"


def _subjects(name: str) -> list[str]:
    return [subject for subject in SUBJECTS if subject != CONTROL or CHECKS[name].by_control]


@pytest.mark.parametrize("name", CHECKS)
def test_plain(name: str, tmp_path: Path) -> None:
    outcomes = {}
    for subject in _subjects(name):
        with torch.random.fork_rng():
            outcomes[subject] = outcome(name, Subject(subject, tmp_path / subject))
    _judge(name, outcomes)


ON_RANKS = [name for name, found in CHECKS.items() if found.on_ranks]


@pytest.fixture(scope="module")
def on_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcomes]:
    """Outcomes of the checks that were chosen, by check."""
    chosen = {item.callspec.params["name"] for item in request.session.items if getattr(item, "originalname", "") == "test_fsdp2"}
    names = [name for name in ON_RANKS if name in chosen]
    return outcomes_on_ranks({name: _subjects(name) for name in names}, tmp_path_factory.mktemp("ranks"))


@pytest.mark.distributed
@pytest.mark.timeout(360)
@pytest.mark.parametrize("name", ON_RANKS)
def test_fsdp2(name: str, on_ranks: Mapping[str, Outcomes]) -> None:
    _judge(name, on_ranks[name])


def test_deviations_are_checks_with_a_reason() -> None:
    assert DEVIATIONS.keys() <= CHECKS.keys()
    assert all(deviation.reason and deviation.seen for deviation in DEVIATIONS.values())


def test_every_scheduler_of_torch_is_checked() -> None:
    assert schedulers_of_torch() == SCHEDULERS.keys()
