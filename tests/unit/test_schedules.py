"""Schedules: bands of singular values, mistakes, scales and dtypes of the input; the Gram form."""

import numpy as np
import pytest
import torch
from torch import Tensor

from omn_dist import orthogonalize
from omn_dist.algorithms.coefficients import SCHEDULES, Schedule, make_schedule
from omn_dist.algorithms.iteration import chosen_form, gram_flops, gram_form, standard_flops, standard_form
from omn_dist.algorithms.newton_schulz import DTYPES, build_recipe
from omn_dist.settings import SettingsError

BANDS = {
    ("quintic", None): (0.47, 1.20),
    ("tuned_quintic", None): (0.48, 1.15),
    ("polar_express", 5): (0.85, 1.12),
    ("polar_express", 8): (1.000, 1.000),
    ("cans", None): (0.88, 1.12),
    ("deepseek_v4", None): (1.000, 1.001),
}
"""Published figures for singular values 1e-3..1, to the digits given."""


@pytest.mark.parametrize(("name", "ns_steps"), BANDS)
def test_singular_values_land_in_the_published_band(name: str, ns_steps: int | None) -> None:
    low, high = make_schedule(name, ns_steps).band()
    expected = BANDS[name, ns_steps]
    # Half a digit of the printed figure, and what a finer grid of values adds.
    digits = 3 if expected[0] == 1 else 2
    assert (low, high) == pytest.approx(expected, abs=0.6 * 10**-digits)


def _with_singular_values(values: Tensor, num_rows: int, num_columns: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(num_rows, len(values), generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(num_columns, len(values), generator=generator, dtype=torch.float64)).Q
    return (left * values.double()) @ right.T, left, right


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_whole_call_is_the_composed_polynomial_of_the_singular_values(name: str) -> None:
    values = torch.logspace(0, -3, 12, dtype=torch.float64)
    direction, left, right = _with_singular_values(values, 40, 12)
    found = orthogonalize(direction.float(), build_recipe("scaled", name, dtype="float32")).double()
    expected = (left * torch.from_numpy(SCHEDULES[name].mapped((values / values.norm()).numpy()))) @ right.T
    # fp32 rounding through slopes at zero of up to 3.4^8: 3e-5 was the largest seen (cans).
    assert float((found - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize(
    ("coefficients", "normalization", "message"),
    [
        # Fitted to a normalisation that leaves smaller values: near rank-1 directions flip.
        (((3.9, -9.5, 5.5),) * 2, "frobenius", "expected a positive value everywhere"),
        (((8.2, -23.0, 17.0),) * 4, "frobenius", "fitted for another normalisation"),
        (((3.0, 0.0, 0.0),), "frobenius", "expected at most 2"),
        (((1.5, -0.5, 0.0),), "row_sums", "unknown normalisation"),
        ((), "frobenius", "found no step"),
        (((1.5, float("nan"), 0.0),), "frobenius", "three finite numbers"),
    ],
)
def test_incompatible_pairs_cannot_be_built(
    coefficients: tuple[tuple[float, float, float], ...], normalization: str, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        Schedule(name="x", coefficients=coefficients, normalization=normalization, source="test")  # type: ignore[arg-type]


def test_mistakes_in_names_steps_and_forms() -> None:
    with pytest.raises(SettingsError, match="did you mean 'polar_express'"):
        make_schedule("polar_expres")
    with pytest.raises(SettingsError, match="ns_steps: found 6 with schedule cans, which is fitted for 5"):
        make_schedule("cans", 6)
    with pytest.raises(SettingsError, match="ns_steps: found 0"):
        make_schedule("quintic", 0)
    with pytest.raises(SettingsError, match="the Gram form needs float32"):
        build_recipe("torch", form="gram")
    with pytest.raises(SettingsError, match="did you mean 'float16'"):
        build_recipe("scaled", dtype="flaot16")


def test_own_triples_and_other_numbers_of_steps() -> None:
    own = make_schedule([(1.5, -0.5, 0.0), (2.0, -1.5, 0.5)])
    assert (own.name, own.ns_steps, own.is_cubic) == ("own", 2, False)
    assert make_schedule("polar_express", 11).coefficients[7:] == ((1.875, -1.25, 0.375),) * 4
    assert make_schedule("cubic", 9).is_cubic
    assert make_schedule("quintic", 7).ns_steps == 7


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_updates_point_along_their_direction_at_every_scale(name: str, dtype: str) -> None:
    recipe = build_recipe("scaled", name, dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    rank_one = torch.outer(torch.randn(24, generator=generator), torch.randn(64, generator=generator))
    noise = torch.randn(24, 64, generator=generator)
    for direction in (rank_one, rank_one + 1e-3 * noise, noise, noise.T.contiguous(), torch.stack((noise, rank_one))):
        update = orthogonalize(direction, recipe)
        for one, other in zip(update.view(-1, *direction.shape[-2:]), direction.view(-1, *direction.shape[-2:]), strict=True):
            # Rounding of a rank-1 matrix has rank 24, and many steep steps lift it to one as well:
            # 1 / sqrt(24) is 0.20.
            assert _cosine(one, other) > 0.19
        # A power of two rounds nothing.
        assert torch.equal(orthogonalize(direction * 2.0**60, recipe), update)
        assert torch.equal(orthogonalize(direction * 2.0**-60, recipe), update)
    reference = orthogonalize(noise, recipe)
    for scale in (1e-20, 1e30):
        # A power of ten rounds the direction itself, by a relative 2^-9 where it is cast to bf16. That
        # changes cans most, whose first steps are the steepest: 3.9 %; the others stay under 3 %.
        assert float((orthogonalize(noise * scale, recipe) - reference).norm() / reference.norm()) < (
            0.05 if name == "cans" else 0.03
        )
    assert not orthogonalize(torch.zeros(3, 5), recipe).any()
    assert not orthogonalize(torch.zeros(2, 5, 3), recipe).any()


def test_the_largest_and_the_smallest_numbers() -> None:
    direction = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    direction = direction / direction.abs().max()
    reference = orthogonalize(direction, build_recipe("scaled", dtype="float32"))
    for scale in (3e38, 1.2e-38):
        assert torch.allclose(orthogonalize(direction * scale, build_recipe("scaled", dtype="float32")), reference, atol=1e-3)
    # Subnormal numbers have fewer bits, the direction is coarser, not gone.
    assert _cosine(orthogonalize(direction * 1e-42, build_recipe("scaled", dtype="float32")), reference) > 0.9


# --- the Gram form --------------------------------------------------------------------------------

ZOO = {
    "flat": torch.ones(96),
    "linear": torch.linspace(1, 0, 96),
    "log to 1e-3": torch.logspace(0, -3, 96),
    "log to 1e-6": torch.logspace(0, -6, 96),
    "log to 1e-9": torch.logspace(0, -9, 96),
    "half zeros": torch.cat((torch.ones(48), torch.zeros(48))),
    "rank 10": torch.cat((torch.ones(10), torch.zeros(86))),
    "gamma": torch.from_numpy(np.random.default_rng(0).gamma(0.5, size=96)).float(),
}


@pytest.mark.parametrize("spectrum", list(ZOO))
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_the_gram_form_loses_nothing(name: str, spectrum: str) -> None:
    schedule = SCHEDULES[name]
    values = ZOO[spectrum].double()
    values = values / values.norm()
    normalised, left, right = _with_singular_values(values, 96, 256)
    exact = (left * torch.from_numpy(schedule.mapped(values.numpy()))) @ right.T
    standard, gram = (form(normalised.float(), schedule).double() for form in (standard_form, gram_form))
    errors = [float((found - exact).norm() / exact.norm()) for found in (standard, gram)]
    # Both forms lift rounding by the slopes at zero. The Gram form was at most 10 times as far off as
    # the standard one, and at most twice where that is more than 1e-4 (many steps, spectra with zeros).
    assert errors[1] < max(1e-4, 2 * errors[0]), errors
    bands = [torch.linalg.svdvals(found) for found in (standard, gram)]
    assert float((bands[0] - bands[1]).abs().max()) < max(1e-3, 2 * errors[0] * float(exact.norm()))
    assert float(bands[1].max()) < float(bands[0].max()) + 1e-3


def test_the_gram_form_takes_batches_and_tall_matrices() -> None:
    generator = torch.Generator().manual_seed(1)
    recipe = build_recipe("scaled", dtype="float32", form="gram")
    directions = torch.randn(3, 50, 20, generator=generator)
    for update, direction in zip(orthogonalize(directions, recipe), directions, strict=True):
        reference = orthogonalize(direction, build_recipe("scaled", dtype="float32"))
        assert float((update - reference).norm() / reference.norm()) < 1e-4


def test_costs_and_the_crossover() -> None:
    for short, long in ((3, 5), (64, 200)):
        assert standard_flops(short, long, 5) == 20 * short * short * long + 10 * short**3
        assert gram_flops(short, long, 5) == 8 * short * short * long + 28 * short**3
        assert standard_flops(short, long, 6, cubic=True) == 24 * short * short * long
    quintic = SCHEDULES["quintic"]
    forms = [chosen_form("auto", quintic, 100, long) for long in (100, 149, 150, 151, 400)]
    assert forms == ["standard"] * 3 + ["gram"] * 2
    assert chosen_form("auto", SCHEDULES["cubic"], 100, 100) == "standard"
    assert chosen_form("gram", quintic, 100, 100) == "gram"
