"""QK-Clip: maxima in blocks, factors for every kind of attention, the same on any number of ranks, and a run that needs it."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from references import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from omn_dist.algorithms.qk_clip import HeadRows, clip_factors, largest_logits, row_factors
from omn_dist.optim.qk_clip import QKClip

WIDTH, HEADS, HEAD_WIDTH = 24, 4, 6
THRESHOLD = 40.0


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _all_logits(query: Tensor, key: Tensor, scale: float, visible: Tensor | None = None) -> Tensor:
    """``[heads]``, with all logits at once."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = (query @ key.mT * scale).abs()
    if visible is not None:
        logits = torch.where(visible, logits, 0.0)
    return logits.amax(dim=(0, 2, 3))


@pytest.mark.parametrize("block", [1, 3, 7, 64])
@pytest.mark.parametrize(("num_key_heads", "num_keys"), [(4, 10), (2, 10), (1, 13), (4, 7)])
def test_blocks_see_every_visible_logit(block: int, num_key_heads: int, num_keys: int) -> None:
    query, key = _normal((2, 4, 10, 6), 0), _normal((2, num_key_heads, num_keys, 6), 1)
    scale = 1 / math.sqrt(6)
    causal = torch.ones(10, num_keys, dtype=torch.bool).tril()
    mask = _normal((2, 1, 10, num_keys), 2) > 0
    numbers = torch.zeros(10, num_keys).masked_fill(~causal, -math.inf)
    for options, visible in (
        ({}, None),
        ({"is_causal": True}, causal),
        ({"mask": mask}, mask),
        ({"mask": numbers}, causal),
    ):
        found = largest_logits(query, key, block=block, **options)  # type: ignore[arg-type]
        assert torch.allclose(found, _all_logits(query, key, scale, visible), rtol=1e-6, atol=0)
    assert torch.allclose(largest_logits(query, key, scale=-2.0, block=block), _all_logits(query, key, 2.0), rtol=1e-6)


def test_logits_are_computed_in_fp32_under_autocast() -> None:
    query, key = torch.randn(2, 1, 2, 64, 32, generator=torch.Generator().manual_seed(0)).unbind()
    expected = largest_logits(query, key)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(largest_logits(query, key), expected)


def test_factors() -> None:
    gamma = clip_factors(torch.tensor([5.0, 10.0, 20.0, math.nan, math.inf, 0.0]), 5.0)
    assert gamma.tolist() == [1.0, 0.5, 0.25, 1.0, 1.0, 1.0]
    rows = HeadRows(num_heads=2, sections=((1, 0.5), (1, 1.0), (1, 0.0)), first_row=1, rows_apart=4)
    factors = row_factors(torch.tensor([1.0, 0.25, 1.0, 1.0]), rows, 9)
    assert factors.tolist() == [1.0, 0.5, 0.25, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def _grouped(num_key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key weights with heads of rising size, and inputs."""
    query = _normal((HEADS * HEAD_WIDTH, WIDTH), 0) * torch.tensor([0.1, 0.5, 1.0, 2.0]).repeat_interleave(HEAD_WIDTH)[:, None]
    return query, _normal((num_key_heads * HEAD_WIDTH, WIDTH), 1), _normal((4, 9, WIDTH), 2)


def _project(inputs: Tensor, weight: Tensor) -> Tensor:
    return F.linear(inputs, weight).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)


@pytest.mark.parametrize("num_key_heads", [HEADS, 2, 1])
def test_grouped_attention_lands_on_the_threshold(num_key_heads: int) -> None:
    query, key, inputs = _grouped(num_key_heads)
    weights = [nn.Parameter(query.clone()), nn.Parameter(key.clone())]
    clip = QKClip(threshold=THRESHOLD)
    clip.add_grouped("a", *weights, num_heads=HEADS, num_key_heads=num_key_heads)
    heads = [_project(inputs, weight) for weight in weights]
    value = _project(inputs, key)
    mixed = clip.attention("a", *heads, value, is_causal=True, enable_gqa=True)
    assert torch.equal(mixed, F.scaled_dot_product_attention(*heads, value, is_causal=True, enable_gqa=True))
    before = largest_logits(*heads, is_causal=True)
    assert (before > THRESHOLD).any()
    assert (before < THRESHOLD).any()
    clip.step()
    assert torch.equal(clip.largest["a"], before)
    after = largest_logits(*(_project(inputs, weight) for weight in weights), is_causal=True)
    groups = before.view(num_key_heads, -1)
    for group, (largest, clipped) in enumerate(zip(groups, after.view(num_key_heads, -1), strict=True)):
        rows = slice(group * HEAD_WIDTH, (group + 1) * HEAD_WIDTH)
        if float(largest.max()) <= THRESHOLD:
            assert torch.equal(weights[1][rows], key[rows]), "a key head under the threshold must keep its bits"
            assert torch.equal(clipped, largest)
        else:
            assert float(clipped.max()) == pytest.approx(THRESHOLD, abs=1e-3)
            assert torch.allclose(weights[1][rows], key[rows] * (THRESHOLD / largest.max()).sqrt(), rtol=1e-6)
    for head, largest in enumerate(before):
        rows = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
        if float(largest) <= THRESHOLD:
            assert torch.equal(weights[0][rows], query[rows]), "a query head under the threshold must keep its bits"
        else:
            assert torch.allclose(weights[0][rows], query[rows] * (THRESHOLD / largest).sqrt(), rtol=1e-6)


def test_biases_are_scaled_too() -> None:
    query, key, inputs = _grouped(HEADS)
    weights = [nn.Parameter(query), nn.Parameter(key), nn.Parameter(_normal((24,), 5)), nn.Parameter(_normal((24,), 6))]
    clip = QKClip(threshold=THRESHOLD)
    clip.add_grouped("a", weights[0], weights[1], num_heads=HEADS, query_bias=weights[2], key_bias=weights[3])

    def heads() -> list[Tensor]:
        pairs = ((weights[0], weights[2]), (weights[1], weights[3]))
        return [F.linear(inputs, w, b).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for w, b in pairs]

    clip.observe("a", largest_logits(*heads()))
    clip.step()
    assert float(largest_logits(*heads()).max()) == pytest.approx(THRESHOLD, abs=1e-3)


def test_latent_attention_leaves_values_and_the_shared_key_alone() -> None:
    nope, rope, value, rank, threshold = 6, 4, 5, 8, 3.0
    query = nn.Parameter(_normal((HEADS * (nope + rope), rank), 0))
    key_value = nn.Parameter(_normal((HEADS * (nope + value), rank), 1))
    latent, shared_rope = _normal((3, 7, rank), 2), _normal((3, 1, 7, rope), 3)
    before = [query.detach().clone(), key_value.detach().clone()]

    def largest() -> Tensor:
        q = F.linear(latent, query).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = F.linear(latent, key_value).unflatten(-1, (HEADS, -1)).transpose(1, 2)[..., :nope]
        return largest_logits(q, torch.cat((k, shared_rope.expand(-1, HEADS, -1, -1)), dim=-1))

    clip = QKClip(threshold=threshold)
    clip.add_latent("a", query, key_value, num_heads=HEADS, nope_width=nope, rope_width=rope, value_width=value)
    seen = largest()
    seen[0] = 1.0
    clip.observe("a", seen)
    clip.step()
    after = largest()
    assert torch.allclose(after[1:], torch.full((HEADS - 1,), threshold), rtol=0, atol=1e-3)
    gamma = (threshold / seen).clamp(max=1)
    for tensor, old, width in ((query, before[0], nope + rope), (key_value, before[1], nope + value)):
        new, old = tensor.detach().view(HEADS, width, rank), old.view(HEADS, width, rank)
        assert torch.equal(new[0], old[0])
        assert torch.allclose(new[:, :nope], old[:, :nope] * gamma.sqrt()[:, None, None], rtol=1e-6)
        expected = old[:, nope:] * gamma[:, None, None] if tensor is query else old[:, nope:]
        assert torch.allclose(new[:, nope:], expected, rtol=1e-6)
    assert torch.equal(key_value.detach().view(HEADS, -1, rank)[:, nope:], before[1].view(HEADS, -1, rank)[:, nope:])


def _clipped(dim: int) -> list[Tensor]:
    """Each rank sees its own sequence of the batch; weights are sharded along ``dim``."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    query, key, inputs = _grouped(2)
    mesh = init_device_mesh("cpu", (world_size,))
    weights = [nn.Parameter(distribute_tensor(weight, mesh, [Shard(dim)])) for weight in (query, key)]
    bias = nn.Parameter(distribute_tensor(_normal((24,), 5), mesh, [Shard(0)]))
    clip = QKClip(threshold=THRESHOLD)
    clip.add_grouped("a", *weights, num_heads=HEADS, num_key_heads=2, query_bias=bias)
    mine = inputs.tensor_split(world_size)[rank]
    for sequence in mine:
        clip.observe("a", largest_logits(_project(sequence[None], query), _project(sequence[None], key)))
    clip.step()
    return [*(whole(weight) for weight in (*weights, bias)), clip.largest["a"]]


@pytest.mark.parametrize("dim", [0, 1])
def test_four_ranks_clip_like_one(dim: int) -> None:
    (expected,) = run_ranks(1, _clipped, dim)
    for found in run_ranks(4, _clipped, dim):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_interval_and_state() -> None:
    query, key, inputs = _grouped(HEADS)
    weights = [nn.Parameter(query.clone()), nn.Parameter(key.clone())]
    clip = QKClip(threshold=THRESHOLD, interval=3)
    clip.add_grouped("a", *weights, num_heads=HEADS)
    heads = [_project(inputs, weight) for weight in (query, key)]
    for step in range(2):
        assert not clip.due, step
        clip.attention("a", *heads, heads[1])
        clip.step()
        assert torch.equal(weights[0], query)
    twin = QKClip(threshold=THRESHOLD, interval=3)
    twin.add_grouped("a", *weights, num_heads=HEADS)
    twin.load_state_dict(clip.state_dict())
    assert twin.due
    twin.attention("a", *heads, heads[1])
    twin.step()
    assert not torch.equal(weights[0], query)
    again = QKClip(threshold=THRESHOLD)
    with pytest.raises(ValueError, match="layer a: in the saved state"):
        again.load_state_dict(twin.state_dict())
    saved = twin.state_dict()
    saved["largest"]["a"] = saved["largest"]["a"][:1]
    with pytest.raises(ValueError, match=r"layer a: found maxima of shape \(1,\)"):
        twin.load_state_dict(saved)


def test_values_that_are_not_finite_change_nothing() -> None:
    weight = nn.Parameter(_normal((24, 8), 0))
    before = weight.detach().clone()
    clip = QKClip(threshold=1.0)
    clip.add_grouped("a", weight, weight, num_heads=4)
    clip.observe("a", torch.tensor([math.nan, math.inf, 0.5, 1.0]))
    clip.step()
    assert torch.equal(weight, before)


def test_mistakes() -> None:
    weight = nn.Parameter(torch.ones(24, 8))
    clip = QKClip(threshold=1.0)
    clip.add_grouped("a", weight, weight, num_heads=4)
    wrong: list[tuple[Any, str]] = [
        (lambda: QKClip(threshold=0.0), "threshold: found 0.0"),
        (lambda: QKClip(threshold=1.0, interval=0), "interval: found 0"),
        (lambda: clip.add_grouped("a", weight, weight, num_heads=4), "added twice"),
        (lambda: clip.add_grouped("b", weight, weight, num_heads=5), "24 rows for 5 heads"),
        (lambda: clip.add_grouped("b", weight, weight, num_heads=4, num_key_heads=3), "4 query heads for 3 heads"),
        (lambda: clip.add("b", 2, [(weight, HeadRows(num_heads=2, sections=((20, 0.5),)))]), "a weight of 24 rows, expected 40"),
        (lambda: clip.observe("c", torch.ones(4)), "layer c: not added, expected one of a"),
        (lambda: clip.observe("a", torch.ones(4), first_head=2), "up to head 6, expected 4 heads"),
        (lambda: largest_logits(torch.ones(1, 3, 2, 4), torch.ones(1, 2, 2, 4)), "3 heads for 2 key heads"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(RuntimeError, match="layer a: no logits reported"):
        clip.step()


def test_logits_that_explode_stay_at_the_threshold_with_it() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "qk_clip.py"
    spec = importlib.util.spec_from_file_location("qk_clip_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    free = benchmark.train(1e30, 80, 0.1)
    clipped = benchmark.train(15.0, 80, 0.1)
    assert free["largest_logit"][-1] > 100
    # What one step adds before the next clip.
    assert max(clipped["largest_logit"]) < 1.6 * 15.0
    assert clipped["loss"][-1] < clipped["loss"][0] - 1.0
