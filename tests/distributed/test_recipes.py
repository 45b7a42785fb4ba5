"""Presets against short references and closed forms; decay, guards, vectors and what goes wrong with scales and dtypes."""

import math
import warnings
from typing import Any

import pytest
import torch
from ranks import run_ranks
from recipe_references import CUBIC, POLAR_EXPRESS, QUINTIC, muon, rms_scale
from references import set_gradient, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from omn_dist import PRESETS, DualOptimizer, orthogonalize
from omn_dist.algorithms.guards import spectral_norm, stable_rank
from omn_dist.algorithms.iteration import standard_flops
from omn_dist.algorithms.newton_schulz import build_recipe, group_recipe
from omn_dist.settings import SettingsError

SHAPES = [(32, 8), (8, 32), (12, 12)]
WITH_EVERY_SCALE = ["normuon", "normuon_code", "moonlight", "qwen", "muonclip"]


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _after(weight: Tensor, gradients: list[Tensor], **options: Any) -> Tensor:
    parameter = nn.Parameter(weight.clone())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = DualOptimizer([{"params": [parameter], "algorithm": "muon"}], **{"preset": "omn", **options})
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(parameter.grad, gradient), "a step changed a gradient"
    return parameter.detach()


# --- presets -------------------------------------------------------------------------------------------------------------

REFERENCES: dict[str, dict[str, Any]] = {
    "moonlight": {"triples": QUINTIC, "scale": rms_scale, "momentum": "nesterov"},
    "qwen": {"triples": POLAR_EXPRESS, "scale": rms_scale, "momentum": "nesterov"},
    "muonclip": {"triples": CUBIC, "scale": rms_scale, "momentum": "ema"},
    "omn": {"triples": QUINTIC, "scale": lambda m, n: math.sqrt(max(1, m / n)), "momentum": "nesterov"},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("preset", list(REFERENCES))
def test_presets_against_their_references(preset: str, shape: tuple[int, int]) -> None:
    weight, gradients = _normal(shape, 0), [_normal(shape, 1 + step) for step in range(3)]
    expected = muon(weight, gradients, lr=0.01, decay=0.1, **REFERENCES[preset])
    moved = float((expected - weight).norm())
    precise = _after(weight, gradients, preset=preset, ns_dtype="float32", lr=0.01, weight_decay=0.1)
    # fp32 against fp64 and an SVD: 1.3e-5 was the worst seen, nearly all of it the rounding of weights 100 times the step.
    assert float((precise - expected).norm()) / moved < 3e-5
    published = _after(weight, gradients, preset=preset, lr=0.01, weight_decay=0.1)
    # bf16 iterations are 0.5 to 1.7 % off on gaussians, and these are small and square ones among them.
    assert float((published - expected).norm()) / moved < 0.03


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("preset", ["omn", "torch", "moonlight", "qwen", "muonclip"])
def test_update_norms_in_closed_form(preset: str, shape: tuple[int, int]) -> None:
    # All singular values of this gradient are one, so all of the update are p(1 / sqrt(s)).
    short = min(shape)
    gradient = torch.linalg.qr(_normal((max(shape), short), 5)).Q
    gradient = gradient if shape[0] > shape[1] else gradient.T.contiguous()
    recipe = PRESETS[preset]
    schedule = group_recipe(vars(recipe)).schedule
    value = float(schedule.mapped(torch.tensor([1 / math.sqrt(short)], dtype=torch.float64).numpy())[0])
    scale = rms_scale(*shape) if recipe.scale.startswith("0.2") else math.sqrt(max(1, shape[0] / shape[1]))
    moved = _after(torch.zeros(shape), [gradient], preset=preset, lr=0.5).norm()
    # Half precision: 1.5 % was the worst seen.
    assert float(moved) == pytest.approx(0.5 * scale * value * math.sqrt(short), rel=1e-5 if preset == "omn" else 0.02)


def test_every_field_is_one_override_away() -> None:
    parameter = nn.Parameter(_normal((8, 12), 0))
    group = {"params": [parameter], "algorithm": "muon", "schedule": "cans", "ns_steps": None, "ns_dtype": "float16"}
    optimizer = DualOptimizer([group], schedule="polar_express", ns_steps=6, preset="omn")
    recipe = group_recipe(optimizer.param_groups[0])
    assert (recipe.schedule.name, recipe.dtype) == ("cans", torch.float16)
    assert optimizer.preset.ns_steps == 6
    own = [[1.5, -0.5, 0.0], [1.5, -0.5, 0.0]]
    DualOptimizer([{"params": [parameter], "algorithm": "muon", "schedule": own}], preset="omn")
    for wrong, message in (
        ({"schedule": "cans", "ns_steps": 3}, "fitted for 5"),
        ({"schedule": [[9.0, -30.0, 30.0]]}, "another normalisation"),
        ({"form": "gram", "ns_dtype": "bfloat16"}, "needs float32"),
        ({"form": "standart"}, "did you mean 'standard'"),
        ({"scale": "spectral"}, "unknown"),
        ({"spectral_cap": 0.0}, "spectral_cap: found 0.0"),
        ({"row_beta": 1.5}, "row_beta: found 1.5"),
    ):
        with pytest.raises(SettingsError, match=message):
            DualOptimizer([{"params": [parameter], "algorithm": "muon"}], **{"preset": "omn", **wrong})


def test_the_gram_form_in_a_step_and_in_the_plan() -> None:
    weight, gradient = _normal((8, 64), 0), _normal((8, 64), 1)
    standard = _after(weight, [gradient], preset="omn")
    for form in ("gram", "auto"):
        assert torch.allclose(_after(weight, [gradient], preset="omn", form=form), standard, rtol=0, atol=1e-6)
    optimizer = DualOptimizer([{"params": [nn.Parameter(weight)], "algorithm": "muon"}], form="auto", preset="omn")
    assert optimizer.plans[0].matrices[0].flops == 8 * 8 * 8 * 64 + 28 * 8**3
    assert "(gram)" in optimizer.plans[0].description[-1]


def test_a_cubic_schedule_in_the_plan() -> None:
    matrices = [nn.Parameter(_normal((32, 80), 0)), nn.Parameter(_normal((19, 80), 0))]
    optimizer = DualOptimizer([{"params": matrices, "algorithm": "muon"}], preset="omn", schedule="cubic")
    plan = optimizer.plans[0]
    assert plan.matrices[0].flops == standard_flops(32, 80, 5, cubic=True)
    assert plan.matrices[1].work.form == "cubic"
    assert "(cubic)" in "\n".join(plan.description)


def test_other_forms_are_refused_with_the_known_ones() -> None:
    for form in ("symmetric", "symetric"):
        group = {"params": [nn.Parameter(_normal((32, 80), 0))], "algorithm": "muon", "form": form}
        with pytest.raises(SettingsError, match=rf"form: unknown choice '{form}'.* \(known: auto, gram, standard\)"):
            DualOptimizer([group], preset="omn")
        with pytest.raises(SettingsError, match=rf"form: unknown choice '{form}'.* \(known: auto, gram, standard\)"):
            DualOptimizer([{"params": group["params"], "algorithm": "muon"}], form=form, preset="omn")


# --- scales and dtypes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", WITH_EVERY_SCALE)
def test_gradients_of_any_scale_give_the_same_step(preset: str) -> None:
    weight, gradient = torch.zeros(12, 40), _normal((12, 40), 1)
    reference = _after(weight, [gradient], preset=preset)
    assert reference.any()
    for scale in (1e-20, 1e30):
        moved = _after(weight, [gradient * scale], preset=preset)
        assert float((moved - reference).norm() / reference.norm()) < 0.03


@pytest.mark.parametrize("preset", ["omn", "torch"])
def test_the_documented_range_of_the_published_recipes(preset: str) -> None:
    weight, gradient = torch.zeros(12, 40), _normal((12, 40), 1)
    reference = _after(weight, [gradient], preset=preset)
    for scale in (1e-4, 1e15):
        moved = _after(weight, [gradient * scale], preset=preset)
        assert float((moved - reference).norm() / reference.norm()) < 0.03
    # Under their floors of 1e-7 the update fades: documented, and what the recipe scaled is for.
    assert float(_after(weight, [gradient * 1e-20], preset=preset).norm()) < 0.01 * float(reference.norm())


@pytest.mark.parametrize("preset", list(PRESETS))
def test_zero_gradients_on_zero_weights_stay_finite_and_unmoved(preset: str) -> None:
    for shape in [*SHAPES, (1, 16), (16, 1)]:
        assert not _after(torch.zeros(shape), [torch.zeros(shape)] * 2, preset=preset).any()


@pytest.mark.parametrize("preset", list(PRESETS))
def test_half_precision_weights_take_one_rounding_and_a_warning(preset: str) -> None:
    weight, gradient = _normal((8, 24), 0).bfloat16(), _normal((8, 24), 1).bfloat16()
    options: dict[str, Any] = {"preset": preset, "lr": 0.5, "weight_decay": 0.1}
    with pytest.warns(UserWarning, match="of a weight rounds away; keep parameters in float32"):
        DualOptimizer([{"params": [nn.Parameter(weight)], "algorithm": "muon"}], **{"preset": "omn", **options})
    found = _after(weight, [gradient], **options)
    # The direction of bf16 momentum is rounded to bf16, and Newton-Schulz makes of that what it makes in fp32: a step apart
    # from the fp32 one by percents, but on the grid of the weights by one rounding of decay and step together.
    precise = _after(weight.float(), [gradient.float()], **options)
    step = (precise - weight.float()).norm()
    rounding = 2**-8 * weight.float().norm()
    assert float((found.float() - precise).norm()) < 0.03 * float(step) + float(rounding)
    assert found.dtype == torch.bfloat16


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", ["normuon", "muonclip"])
def test_momentum_is_no_alias_of_the_direction(preset: str, dtype: torch.dtype, nesterov: bool) -> None:
    parameter = nn.Parameter(torch.zeros(6, 10, dtype=dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = DualOptimizer([{"params": [parameter], "algorithm": "muon"}], preset=preset, nesterov=nesterov)
    expected = torch.zeros(6, 10, dtype=torch.float64)
    for step in range(3):
        parameter.grad = _normal((6, 10), step).to(dtype)
        expected = 0.95 * expected + 0.05 * parameter.grad.double()
        optimizer.step()
    found = optimizer.state[parameter]["momentum_buffer"].double()
    # bf16 keeps eight bits, three roundings.
    assert float((found - expected).norm() / expected.norm()) < (1e-6 if dtype == torch.float32 else 3 * 2**-8)


# --- decay and guards ----------------------------------------------------------------------------------------------------


def test_cautious_decay_leaves_out_what_moves_away_from_zero() -> None:
    weight, gradient = _normal((8, 12), 0), _normal((8, 12), 1)
    plain = _after(weight, [gradient], lr=0.1, weight_decay=0.0)
    found = _after(weight, [gradient], lr=0.1, weight_decay=0.5, cautious_decay=True)
    towards_zero = (weight - plain) * weight >= 0
    assert towards_zero.any()
    assert not towards_zero.all()
    assert torch.equal(found[~towards_zero], plain[~towards_zero])
    expected = plain - 0.05 * weight
    assert torch.allclose(found[towards_zero], expected[towards_zero], rtol=1e-5, atol=1e-6)
    assert float(_after(weight, [torch.zeros(8, 12)], lr=0.01, weight_decay=10.0, cautious_decay=True).norm()) == pytest.approx(
        0.9 * float(weight.norm()), rel=1e-6
    )


def test_the_spectral_norm_is_a_close_lower_bound() -> None:
    for seed, shape in enumerate([(20, 30), (64, 16), (50, 50)]):
        update = orthogonalize(_normal(shape, seed))
        for matrix in (update, _normal(shape, seed)):
            exact = float(torch.linalg.matrix_norm(matrix, 2))
            assert 0.95 * exact < float(spectral_norm(matrix)) <= exact * (1 + 1e-6)
    assert float(spectral_norm(torch.zeros(3, 4))) == 0
    batch = torch.stack([_normal((5, 7), 1), torch.zeros(5, 7)])
    assert torch.allclose(spectral_norm(batch), torch.stack([spectral_norm(one) for one in batch]), rtol=1e-5)


def test_the_spectral_cap_bounds_the_update() -> None:
    gradient, weight = _normal((24, 24), 0), torch.zeros(24, 24)
    largest = float(torch.linalg.matrix_norm(_after(weight, [gradient], lr=1.0), 2))
    assert largest > 1.1
    found = float(torch.linalg.matrix_norm(_after(weight, [gradient], lr=1.0, spectral_cap=1.0), 2))
    assert 0.99 < found < 1.05
    assert torch.equal(_after(weight, [gradient], lr=1.0, spectral_cap=2.0), _after(weight, [gradient], lr=1.0)), (
        "a cap that is not reached must change nothing"
    )


def test_the_stable_rank_guard_falls_back_to_the_direction() -> None:
    rank_one = torch.outer(_normal((24,), 0), _normal((40,), 1))
    noise = _normal((24, 40), 2)
    low = rank_one + 1e-4 * noise
    assert float(stable_rank(low)) == pytest.approx(1, abs=1e-3)
    assert float(stable_rank(1e30 * noise)) == pytest.approx(float(stable_rank(noise)), rel=1e-4)
    assert float(stable_rank(noise)) > 5
    options: dict[str, Any] = {"preset": "moonlight", "lr": 1.0, "scale": "1", "weight_decay": 0.0}
    guarded = _after(torch.zeros(24, 40), [low], stable_rank_floor=1.5, **options)
    # The direction crosses the wire in bf16.
    assert float((guarded + low / low.norm()).norm()) < 0.01
    free = _after(torch.zeros(24, 40), [low], **options)
    assert float((free + low / low.norm()).norm()) > 0.1
    assert torch.equal(
        _after(torch.zeros(24, 40), [noise], stable_rank_floor=1.5, **options), _after(torch.zeros(24, 40), [noise], **options)
    )
    assert not _after(torch.zeros(4, 6), [torch.zeros(4, 6)], stable_rank_floor=1.5, **options).any()


def test_a_vector_in_a_group_on_muon_is_obeyed() -> None:
    for shape in ((1, 16), (16, 1)):
        gradient = _normal(shape, 0)
        moved = _after(torch.zeros(shape), [gradient], preset="qwen", scale="1", lr=1.0)
        assert float((moved + gradient / gradient.norm()).norm()) < 0.02


def test_rank_one_with_and_without_normalisation() -> None:
    """What the documentation says of rank-1 inputs: sigma u v^T with sigma = sqrt(3) is mapped to zero without normalisation."""

    def unnormalised(matrix: Tensor) -> Tensor:
        for _ in range(5):
            matrix = 1.5 * matrix - 0.5 * matrix @ (matrix.T @ matrix)
        return matrix

    left, right = _normal((24,), 0).double(), _normal((40,), 1).double()
    unit = torch.outer(left / left.norm(), right / right.norm())
    assert float(unnormalised(math.sqrt(3) * unit).norm()) < 1e-6
    assert float(unnormalised(0.01 * unit).norm()) < 0.08
    assert float((unnormalised(1.0 * unit) - unit).norm()) < 1e-12
    assert not float(unnormalised(3.0 * unit).norm()) < 1e6
    for sigma in (1e-6, 0.01, math.sqrt(3), 3.0, 1e6):
        normalised = orthogonalize(sigma * unit, build_recipe("scaled", "cubic", dtype="float32"))
        assert float((normalised - unit).norm()) < 1e-5


# --- vectors -------------------------------------------------------------------------------------------------------------

SEGMENTS = ((0, 12, 0.4), (12, 16, 0.2), (16, 19, 0.1, False))


def _vectors(sharded: bool) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),)) if sharded else None
    weight = _normal((19,), 0)
    parameter = nn.Parameter(weight if mesh is None else distribute_tensor(weight, mesh, [Shard(0)]))
    matrix = nn.Parameter(_normal((8, 6), 1) if mesh is None else distribute_tensor(_normal((8, 6), 1), mesh, [Shard(0)]))
    optimizer = DualOptimizer(
        [
            {"params": [parameter], "algorithm": "vector", "segments": SEGMENTS, "lr": 0.1, "weight_decay": 0.5},
            {"params": [matrix], "algorithm": "muon"},
        ],
        wave_bytes=1,
        preset="omn",
    )
    for step in range(3):
        set_gradient(parameter, _normal((19,), 10 + step) * 10.0 ** -torch.arange(19))
        set_gradient(matrix, _normal((8, 6), 20 + step))
        optimizer.step()
    (plan,) = optimizer.plans
    assert [matrix.name for matrix in plan.matrices if matrix.work.ns_steps == 0] == [
        f"parameter_0[{start}:{stop}]" for start, stop, *_ in sorted(SEGMENTS)
    ]
    return [whole(parameter), whole(matrix), whole(optimizer.state[parameter]["momentum_buffer"])]


def _vectors_on_ranks() -> list[Tensor]:
    return _vectors(sharded=True)


def test_vectors_move_by_segments_with_their_own_scale_and_decay() -> None:
    weight, buffer = _normal((19,), 0).double(), torch.zeros(19, dtype=torch.float64)
    for step in range(3):
        gradient = (_normal((19,), 10 + step) * 10.0 ** -torch.arange(19)).double()
        buffer = 0.95 * buffer + gradient
        direction = gradient + 0.95 * buffer
        decay = torch.tensor([0.5] * 16 + [0.0] * 3)
        update = torch.cat([scale * direction[a:b] / direction[a:b].norm() for a, b, scale, *_ in SEGMENTS])
        weight = weight * (1 - 0.1 * decay) - 0.1 * update
    found, *_ = _vectors(sharded=False)
    assert torch.allclose(found.double(), weight, rtol=0, atol=1e-6)


def test_vectors_are_bitwise_one_process() -> None:
    expected = _vectors(sharded=False)
    for found in run_ranks(3, _vectors_on_ranks):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (((0, 5),), "segments of 5 elements, expected all 6"),
        (((0, 3), (4, 6)), "after element 3"),
        (((0, 6, -1.0),), "scale >= 0"),
    ],
)
def test_segments_must_cover_the_vector(segments: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        DualOptimizer([{"params": [nn.Parameter(torch.ones(6))], "algorithm": "vector", "segments": segments}], preset="omn")
    with pytest.raises(ValueError, match="expected one dim"):
        DualOptimizer([{"params": [nn.Parameter(torch.ones(6, 2))], "algorithm": "vector"}], preset="omn")


# --- AdamW ---------------------------------------------------------------------------------------------------------------


def test_without_decay_adamw_is_adam() -> None:
    parameter, reference = (nn.Parameter(_normal((9, 5), 0)) for _ in range(2))
    optimizer = DualOptimizer([{"params": [parameter], "algorithm": "adamw", "weight_decay": 0.0}], preset="moonlight")
    adam = torch.optim.Adam([reference], lr=4.2e-4, betas=(0.9, 0.95))
    for step in range(5):
        parameter.grad = reference.grad = _normal((9, 5), 1 + step)
        optimizer.step()
        adam.step()
    assert torch.equal(parameter, reference)
