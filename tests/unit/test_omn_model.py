"""The OMN transformer: sizes, structure, initial weights and sharding."""

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from omn_dist.models import OMN, OMNConfig, shard_model
from omn_dist.models.omn import apply_rotary, rotary_tables
from omn_dist.settings import SettingsError

TINY = OMNConfig(num_layers=3, hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=40, vocab_size=61)
MATRIX_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def build(config: OMNConfig = TINY, seed: int = 0) -> OMN:
    model = OMN(config)
    model.initialize_weights(seed)
    return model


def batch(num_sequences: int = 3, length: int = 17, vocab_size: int = 61) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocab_size, (num_sequences, length + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture(scope="module")
def omn_1() -> OMN:
    with torch.device("meta"):
        return OMN(OMNConfig.omn_1())


def test_omn_1_has_exactly_the_published_counts(omn_1: OMN) -> None:
    parameters = dict(omn_1.named_parameters())
    matrices = {name: p for name, p in parameters.items() if name.split(".")[-2] in MATRIX_NAMES}
    assert sum(p.numel() for p in parameters.values()) == 1_503_200_256
    assert len(matrices) == 196
    assert sum(p.numel() for p in matrices.values()) == 1_240_465_408
    assert omn_1.embed_tokens.weight.numel() == 262_668_288
    assert sum(p.numel() for p in parameters.values() if p.ndim == 1) == 66_560
    assert len(omn_1.state_dict()) == 283
    assert list(omn_1.buffers()) == []


def test_omn_1_block_has_the_published_shapes(omn_1: OMN) -> None:
    shapes = {name: tuple(p.shape) for name, p in omn_1.layers[0].named_parameters()}
    assert shapes == {
        "input_norm.weight": (2048,),
        "attention.q_proj.weight": (2048, 2048),
        "attention.k_proj.weight": (512, 2048),
        "attention.v_proj.weight": (512, 2048),
        "attention.o_proj.weight": (2048, 2048),
        "attention.q_norm.weight": (128,),
        "attention.k_norm.weight": (128,),
        "feed_forward.gate_proj.weight": (5504, 2048),
        "feed_forward.up_proj.weight": (5504, 2048),
        "feed_forward.down_proj.weight": (2048, 5504),
    }
    elements = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2}
    assert sum(count for name, count in elements.items() if name.startswith("attention")) == 10_485_760
    assert sum(count for name, count in elements.items() if name.startswith("feed_forward")) == 33_816_576


def test_forward_equals_the_formula_written_out() -> None:
    """Forward against a second implementation of the block."""
    model = build().double()
    tokens, _ = batch()
    length = tokens.shape[1]
    angle = torch.arange(length)[:, None] / TINY.rope_theta ** (torch.arange(0, 8, 2) / 8)[None]

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + TINY.norm_epsilon).sqrt() * gain

    def turn(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        # Gains of one would hide a norm that is exchanged with another or missing.
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
        x = model.embed_tokens(tokens)
        for block in model.layers:
            a, f = block.attention, block.feed_forward
            n = norm(x, block.input_norm.weight)
            q = turn(norm(a.q_proj(n).unflatten(-1, (4, 8)), a.q_norm.weight).transpose(1, 2))
            k = turn(norm(a.k_proj(n).unflatten(-1, (2, 8)), a.k_norm.weight).transpose(1, 2))
            v = a.v_proj(n).unflatten(-1, (2, 8)).transpose(1, 2)
            k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
            scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            mixed = a.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
            x = x + mixed + f.down_proj(F.silu(f.gate_proj(n)) * f.up_proj(n))
        expected = norm(x, model.norm.weight) @ model.embed_tokens.weight.T
        # The only difference: norms and positions of the model are fp32, for any dtype.
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-6)


def test_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    model = build()
    tokens, targets = batch()
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    assert torch.equal(model(tokens, targets), expected)


def test_a_token_changes_no_logits_before_it_and_all_from_it_on() -> None:
    model = build()
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % TINY.vocab_size
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert torch.equal(difference[:9], torch.zeros(9))
    assert (difference[9:] > 0).all()


def test_query_heads_read_the_key_value_head_of_their_group() -> None:
    """Zero values in key/value head 1 silence query heads 2 and 3, and no other."""
    attention = build().layers[0].attention
    x = torch.randn(2, 5, TINY.hidden_size, generator=torch.Generator().manual_seed(3))
    cosine, sine = rotary_tables(5, TINY.head_dim, TINY.rope_theta, torch.device("cpu"))
    with torch.no_grad():
        attention.v_proj.weight[TINY.head_dim :] = 0
        attention.o_proj.weight.zero_()[:, : TINY.hidden_size] = torch.eye(TINY.hidden_size)
        # o_proj passes the first 24 of 32 channels: heads 0, 1, 2.
        heads = attention(x, cosine, sine)
    assert (heads[..., :16].abs().amax(dim=(0, 1)) > 0).all()
    assert torch.equal(heads[..., 16:], torch.zeros(2, 5, 8))


def test_rotary_products_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(4)
    query, key = torch.randn(8, generator=generator), torch.randn(8, generator=generator)
    cosine, sine = rotary_tables(40, 8, 10_000.0, torch.device("cpu"))
    turned_query = apply_rotary(query.expand(1, 1, 40, 8), cosine, sine)[0, 0]
    turned_key = apply_rotary(key.expand(1, 1, 40, 8), cosine, sine)[0, 0]
    products = turned_query @ turned_key.T
    for distance in (0, 1, 7, 30):
        along = products.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-5)
    assert (products[1:, 0] - products[0, 0]).abs().min() > 1e-3
    torch.testing.assert_close(products[0, 0], query @ key)


def test_rotary_tables_stay_fp32_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cosine, sine = rotary_tables(4096, 128, 10_000.0, torch.device("cpu"))
    position = torch.arange(4096, dtype=torch.float64)[:, None]
    angle = position / 10_000.0 ** (torch.arange(0, 128, 2, dtype=torch.float64) / 128)[None]
    assert cosine.dtype == sine.dtype == torch.float32
    # An angle of up to 4095 carries an fp32 rounding of 2.4e-4; in bf16 it would be 16.
    torch.testing.assert_close(cosine[:, :64].double(), angle.cos(), rtol=0, atol=5e-4)


def test_autocast_keeps_the_residual_stream_and_norms_in_fp32() -> None:
    model = build()
    dtypes: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if name in ("layers.1", "layers.1.input_norm", "layers.1.attention.q_norm", "layers.1.attention.q_proj"):
            module.register_forward_hook(lambda _m, _i, output, name=name: dtypes.__setitem__(name, output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(*batch())
    assert dtypes.pop("layers.1.attention.q_proj") == torch.bfloat16
    assert set(dtypes.values()) == {torch.float32}
    assert loss.dtype == torch.float32


def test_tied_head_is_one_parameter_after_every_conversion() -> None:
    with torch.device("meta"):
        model = OMN(TINY)
    for convert in (lambda m: m.to_empty(device="cpu"), lambda m: m.double(), lambda m: m.float()):
        convert(model)
        assert model.lm_head.weight is model.embed_tokens.weight
        assert "lm_head.weight" not in dict(model.named_parameters())
        assert "lm_head.weight" in model.state_dict()


def test_untied_head_is_a_second_parameter() -> None:
    model = build(dataclasses.replace(TINY, tie_embeddings=False))
    assert not torch.equal(model.lm_head.weight, model.embed_tokens.weight)
    assert "lm_head.weight" in dict(model.named_parameters())


def test_initial_weights_depend_on_the_seed_alone() -> None:
    with torch.device("meta"):
        from_meta = OMN(TINY)
    from_meta.to_empty(device="cpu")
    torch.manual_seed(99)
    from_meta.initialize_weights(7)
    reference, other = build(seed=7).state_dict(), build(seed=8).state_dict()
    for name, value in from_meta.state_dict().items():
        assert torch.equal(value, reference[name]), name
        assert torch.equal(value, other[name]) == (value.ndim == 1), name


def test_initial_weights_have_the_stated_spread() -> None:
    config = dataclasses.replace(TINY, num_layers=8, hidden_size=256, intermediate_size=512, vocab_size=512)
    for name, parameter in build(config).named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = 0.02 / math.sqrt(2 * 8) if residual else 0.02
        # An estimate from n values deviates by 1 / sqrt(2 n), here by less than 0.8 %.
        assert parameter.std().item() == pytest.approx(expected, rel=0.04), name
        assert abs(parameter.mean().item()) < 0.05 * expected, name


def test_different_parameters_start_with_different_values() -> None:
    model = build()
    assert not torch.equal(model.layers[0].attention.k_proj.weight, model.layers[0].attention.v_proj.weight)
    assert not torch.equal(model.layers[0].attention.k_proj.weight, model.layers[1].attention.k_proj.weight)


def test_loss_starts_at_the_logarithm_of_the_vocabulary() -> None:
    config = dataclasses.replace(TINY, vocab_size=272)
    tokens, targets = batch(16, 32, vocab_size=272)
    assert build(config)(tokens, targets).item() == pytest.approx(math.log(272), abs=0.05)


@pytest.mark.parametrize("autocast", [False, True])
def test_activation_checkpointing_changes_no_bit_of_loss_or_gradient(autocast: bool) -> None:
    results = []
    for checkpointing in (False, True):
        model = build(dataclasses.replace(TINY, activation_checkpointing=checkpointing))
        num_runs = [0]
        model.layers[1].attention.q_proj.register_forward_hook(
            lambda *_, num_runs=num_runs: num_runs.__setitem__(0, num_runs[0] + 1)
        )
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(*batch())
        loss.backward()
        assert num_runs == [2 if checkpointing else 1]
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (loss, gradients), (loss_again, gradients_again) = results
    assert torch.equal(loss, loss_again)
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert torch.equal(gradient, gradients_again[name]), name
        assert gradient.any(), name


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 0, "model.num_layers: found 0, expected at least 1"),
        ("vocab_size", -5, "model.vocab_size: found -5"),
        ("num_kv_heads", 3, "expected a multiple of it"),
        ("head_dim", 7, "model.head_dim: found 7, expected an even number"),
        ("rope_theta", 0.0, "model.rope_theta: found 0.0, expected a positive number"),
        ("norm_epsilon", math.nan, "model.norm_epsilon: found nan"),
        ("initializer_std", math.inf, "model.initializer_std: found inf"),
    ],
)
def test_impossible_sizes_are_refused_in_one_line(field: str, value: float, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        dataclasses.replace(TINY, **{field: value})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    """Rank 2 of 4 without the other three, for code that needs no collective."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_ranks")
def test_a_sharded_model_starts_with_its_rows_of_the_same_weights() -> None:
    with torch.device("meta"):
        model = OMN(TINY)
    assert shard_model(model, init_device_mesh("cpu", (4,))) is model
    model.to_empty(device="cpu")
    model.initialize_weights(5)
    assert model.lm_head.weight is model.embed_tokens.weight
    full = dict(build(seed=5).named_parameters())
    sharded = dict(model.named_parameters())
    assert list(sharded) == list(full)
    for name, parameter in sharded.items():
        assert isinstance(parameter, DTensor), name
        chunks = full[name].chunk(4)
        expected = chunks[2] if len(chunks) > 2 else full[name][:0]
        assert torch.equal(parameter.to_local(), expected), name


@pytest.mark.usefixtures("fake_ranks")
def test_blocks_and_root_are_sharded_apart() -> None:
    with torch.device("meta"):
        model = OMN(TINY)
    shard_model(model, init_device_mesh("cpu", (4,)))
    groups = [name for name, module in model.named_modules() if type(module).__name__.startswith("FSDP")]
    assert groups == ["", "layers.0", "layers.1", "layers.2"]
    with pytest.raises(SettingsError, match="sharded already"):
        shard_model(model, init_device_mesh("cpu", (4,)))


@pytest.mark.usefixtures("fake_ranks")
def test_a_mesh_of_three_axes_is_refused() -> None:
    with pytest.raises(SettingsError, match="found a mesh of 3 axes"):
        shard_model(build(), init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")))


def test_no_module_has_a_bias() -> None:
    assert not [name for name, _ in build().named_parameters() if name.endswith("bias")]
    assert all(module.bias is None for module in build().modules() if isinstance(module, nn.Linear))
