"""Members of a team compute the whole matrix's update, as far from exact as one rank's."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from local_team import run_team
from torch import Tensor

from omn_dist.algorithms.newton_schulz import RECIPES, Recipe, build_recipe, orthogonalize
from omn_dist.algorithms.scratch import Scratch
from omn_dist.algorithms.team_newton_schulz import Team, orthogonalize_slice
from omn_dist.plan.geometry.flops import slice_bytes, slice_collectives

# Sides that teams divide and do not, a side shorter than a team, one row, a square.
SHAPES = ((24, 130), (47, 47), (2, 65), (1, 9), (64, 256))
# The largest relative distance from one rank's update on these shapes and teams, in Frobenius norms:
# fp32 2.1e-6, bf16 3.9e-2, fp16 7.5e-3. Both are as far from fp64.
RECIPE_AND_TOLERANCE = {
    "omn": (RECIPES["omn"], 4e-6),
    "torch": (RECIPES["torch"], 5e-2),
    "scaled": (RECIPES["scaled"], 5e-2),
    "scaled in fp16": (build_recipe("scaled", dtype="float16"), 1e-2),
    "polar express": (build_recipe("scaled", "polar_express", 8, "float32"), 4e-6),
    "cubic": (build_recipe("scaled", "cubic", dtype="float32"), 2e-6),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _whole(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _cut(whole: Tensor, size: int) -> list[Tensor]:
    return list(whole.tensor_split(size, dim=1))


def _together(slices: Sequence[Tensor], recipe: Recipe) -> tuple[Tensor, int]:
    results, num_calls = run_team(lambda part, team: orthogonalize_slice(part, recipe, team, Scratch()), slices)
    whole = torch.cat(results, dim=1)
    return whole.to(slices[0].dtype) if recipe.restore_dtype else whole, num_calls


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", RECIPE_AND_TOLERANCE)
def test_slices_together_are_the_update_of_the_whole_matrix(name: str, size: int) -> None:
    recipe, tolerance = RECIPE_AND_TOLERANCE[name]
    exact_recipe = replace(recipe, input_dtype=torch.float64, normalization_dtype=torch.float64, dtype=torch.float64)
    for shape in SHAPES:
        whole = _whole(shape)
        before = whole.clone()
        found, num_calls = _together(_cut(whole, size), recipe)
        expected = orthogonalize(whole, recipe)
        assert torch.equal(whole, before), "a direction was changed"
        assert found.dtype == expected.dtype
        assert _distance(found, expected) <= tolerance, shape
        # In both roundings are few and random: one may be some times the other on small matrices.
        exact = orthogonalize(whole.to(recipe.input_dtype).double(), exact_recipe)
        factor = 1.25 if min(shape) > 40 else 4
        # The norm alone, rounded to fp32, moves everything by up to one unit in its last place, and the
        # cubic steps add about as much. On an AMD EPYC 47 x 47 was 1.1e-7 off as a whole, and 2.3e-7 in
        # four slices.
        smallest = 2 * torch.finfo(torch.float32).eps
        assert _distance(found, exact) <= max(factor * _distance(expected, exact), smallest), shape
        again, _ = _together(_cut(whole, size), recipe)
        assert torch.equal(found, again), "not reproducible"
        cubic = recipe.schedule.is_cubic
        # All but the one by which the exchange asks for a gradient.
        assert num_calls == slice_collectives(recipe.schedule.ns_steps, "cubic" if cubic else "standard") - 1


def test_slices_of_any_width_and_strides() -> None:
    whole = _whole((8, 40))
    recipe = RECIPES["omn"]
    uneven = [whole[:, :1], whole[:, 1:30], whole[:, 30:].T.contiguous().T]
    found, _ = _together(uneven, recipe)
    assert _distance(found, orthogonalize(whole, recipe)) <= 4e-6


def test_zero_stays_zero_and_a_scale_changes_nothing() -> None:
    whole = _whole((12, 30))
    for recipe in (RECIPES["scaled"], build_recipe("scaled", dtype="float32")):
        found, _ = _together(_cut(whole, 3), recipe)
        for exponent in (-66, 66):
            scaled, _ = _together(_cut(whole * 2.0**exponent, 3), recipe)
            assert torch.equal(found, scaled)
    for recipe in RECIPES.values():
        zero, _ = _together(_cut(torch.zeros(4, 9), 2), recipe)
        assert not zero.any()
        assert zero.isfinite().all()
        # One member alone has zeros.
        part = torch.cat([whole, torch.zeros(12, 30)], dim=1)
        found, _ = _together(_cut(part, 2), recipe)
        assert _distance(found[:, :30], orthogonalize(whole, recipe)) <= 5e-2
        assert not found[:, 30:].any()


def test_bytes_are_those_that_members_hand_over() -> None:
    sent: list[int] = []

    class _Counted(Team):
        def __init__(self, team: Team) -> None:
            self.size, self._team = team.size, team

        def exchange(self, blocks: Tensor) -> Tensor:
            sent.append(blocks.nbytes // self.size * (self.size - 1))
            return self._team.exchange(blocks)

        def gather(self, block: Tensor) -> Tensor:
            sent.append(block.nbytes * (self.size - 1))
            return self._team.gather(block)

    for recipe, form in ((RECIPES["torch"], "standard"), (RECIPE_AND_TOLERANCE["cubic"][0], "cubic")):
        sent.clear()
        run_team(
            lambda part, team, recipe=recipe: orthogonalize_slice(part, recipe, _Counted(team), Scratch()), _cut(_whole((7, 20)), 3)
        )
        steps = recipe.schedule.ns_steps
        # Whether there is a gradient is asked beside it: one fp32 number for each of two others.
        assert sum(sent) == 3 * (slice_bytes(7, steps, 3, form, recipe.dtype.itemsize) - 2 * 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", ["a member is left out", "blocks in another order", "the slice's own Gram matrix"])
def test_the_comparison_fails_when_a_team_is_wrong(fault: str) -> None:
    class _Faulty(Team):
        def __init__(self, team: Team) -> None:
            self.size, self._team = team.size, team

        def exchange(self, blocks: Tensor) -> Tensor:
            found = self._team.exchange(blocks)
            if fault == "a member is left out":
                found[-1] = 0
            elif fault == "the slice's own Gram matrix":
                found[1:] = 0
            return found

        def gather(self, block: Tensor) -> Tensor:
            found = self._team.gather(block)
            return found.flip(0) if fault == "blocks in another order" else found

    whole, recipe = _whole((24, 130)), RECIPES["omn"]
    results, _ = run_team(lambda part, team: orthogonalize_slice(part, recipe, _Faulty(team), Scratch()), _cut(whole, 3))
    # Or it is not a number.
    assert not _distance(torch.cat(results, dim=1), orthogonalize(whole, recipe)) <= 1e-2
