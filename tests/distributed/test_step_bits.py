"""A step has the same bits on every layout, and on a known machine those that are stored."""

from collections.abc import Mapping

import pytest
from step_bits import COMMAND, cases, hashes_of_cases, hashes_of_tensors, machine, stored

from omn_dist import PRESETS

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

Hashes = Mapping[str, Mapping[str, str]]


@pytest.fixture(scope="module")
def tensors() -> Hashes:
    """Hashes by case and tensor."""
    return hashes_of_tensors(cases())


@pytest.mark.parametrize("preset", PRESETS)
def test_layouts_have_the_bits_of_plain_tensors(tensors: Hashes, preset: str) -> None:
    differing = {}
    compared = [case for case in cases() if case.preset == preset and case.reference is not None]
    for case in compared:
        assert case.reference is not None
        found, expected = tensors[case.name], tensors[case.reference]
        assert found.keys() == expected.keys(), case.name
        if names := [name for name in found if found[name] != expected[name]]:
            differing[case.name] = names
    assert len({case.layout for case in compared}) >= 8
    assert not differing


def test_bits_are_those_that_are_stored(tensors: Hashes) -> None:
    known = stored()
    if machine() not in known:
        pytest.skip(f"step_bits.json has no hashes for {machine()}: {COMMAND} adds them")
    found, expected = hashes_of_cases(tensors), known[machine()]
    assert found.keys() == expected.keys(), f"other cases than are stored: {COMMAND} stores these"
    assert not [name for name in found if found[name] != expected[name]]
