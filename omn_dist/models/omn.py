"""The OMN transformer.

In each block, grouped-query attention and SwiGLU run in parallel on the output of one RMSNorm. The
head is tied to the embedding.

Shape suffixes: B sequences, T positions, C hidden width, H query heads, K key/value heads, D head
width, V vocabulary.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from omn_dist.settings import SettingsError

_RESIDUAL_PROJECTIONS = ("o_proj", "down_proj")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OMNConfig:
    """Sizes and options of an OMN transformer; impossible sizes raise :class:`SettingsError`."""

    num_layers: int
    """Number of blocks."""
    hidden_size: int
    """Width C of the residual stream."""
    num_heads: int
    """Query heads H; a multiple of ``num_kv_heads``."""
    num_kv_heads: int
    """Key/value heads K; ``num_heads / num_kv_heads`` query heads share each."""
    head_dim: int
    """Width D of a head; even, because rotary embedding rotates pairs of channels."""
    intermediate_size: int
    """Inner width of the SwiGLU feed-forward."""
    vocab_size: int
    """Token ids are 0 .. ``vocab_size`` - 1."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in every RMSNorm."""
    tie_embeddings: bool = True
    """Whether the head and the embedding are one parameter."""
    initializer_std: float = 0.02
    """Standard deviation of the initial weights.

    That of the o and down projections is divided by sqrt(2 * num_layers).
    """
    activation_checkpointing: bool = False
    """Recompute each block in backward instead of storing its activations.

    The results are bit-identical; memory falls and time rises.
    """

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
        ):
            if getattr(self, name) < 1:
                raise SettingsError(f"model.{name}: found {getattr(self, name)}, expected at least 1")
        for name in ("rope_theta", "norm_epsilon", "initializer_std"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise SettingsError(f"model.{name}: found {value}, expected a positive number")
        if self.num_heads % self.num_kv_heads:
            raise SettingsError(
                f"model.num_heads: found {self.num_heads} with num_kv_heads {self.num_kv_heads}, expected a multiple "
                "of it; each key/value head is shared by the same number of query heads"
            )
        if self.head_dim % 2:
            raise SettingsError(f"model.head_dim: found {self.head_dim}, expected an even number; rotary embedding rotates pairs")

    @classmethod
    def omn_1(cls, *, activation_checkpointing: bool = False) -> Self:
        """The exact OMN-1: 1,503,200,256 unique parameters, 283 ``state_dict`` entries."""
        return cls(
            num_layers=28,
            hidden_size=2048,
            num_heads=16,
            num_kv_heads=4,
            head_dim=128,
            intermediate_size=5504,
            vocab_size=128_256,
            activation_checkpointing=activation_checkpointing,
        )


class RMSNorm(nn.RMSNorm):
    """RMSNorm that computes in fp32 and returns the dtype of its gain, for any input dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of ``x`` (any floating dtype); the shape stays."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(self.weight.dtype)


def rotary_tables(num_positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, fp32, each of shape (num_positions, head_dim).

    Each forward computes them. As buffers they would have to survive construction on the meta
    device, ``to_empty`` and dtype casts of the module, and they cost little next to a block.
    """
    channel = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    wavelength = theta ** (channel / head_dim)
    position = torch.arange(num_positions, device=device, dtype=torch.float32)
    angle = position[:, None] / wavelength[None, :]
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def apply_rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + D/2) of ``x`` (B, heads, T, D) by the angle of their position.

    Computed in fp32.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Attention(nn.Module):
    """Causal grouped-query attention with normalised queries and keys and rotary positions."""

    def __init__(self, config: OMNConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_epsilon)
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_epsilon)

    def forward(self, x_BTC: Tensor, cosine_TD: Tensor, sine_TD: Tensor) -> Tensor:
        """Causal attention output (B, T, C) of the normalised input."""
        num_sequences, num_positions, _ = x_BTC.shape
        q_BTHD = self.q_proj(x_BTC).view(num_sequences, num_positions, self.num_heads, self.head_dim)
        k_BTKD = self.k_proj(x_BTC).view(num_sequences, num_positions, self.num_kv_heads, self.head_dim)
        v_BTKD = self.v_proj(x_BTC).view(num_sequences, num_positions, self.num_kv_heads, self.head_dim)
        # The rotation runs in fp32, like its tables; attention runs in the projections' dtype.
        q_BHTD = apply_rotary(self.q_norm(q_BTHD).transpose(1, 2), cosine_TD, sine_TD).to(v_BTKD.dtype)
        k_BKTD = apply_rotary(self.k_norm(k_BTKD).transpose(1, 2), cosine_TD, sine_TD).to(v_BTKD.dtype)
        mixed_BHTD = F.scaled_dot_product_attention(
            q_BHTD,
            k_BKTD,
            v_BTKD.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        output: Tensor = self.o_proj(mixed_BHTD.transpose(1, 2).reshape(num_sequences, num_positions, -1))
        return output


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: OMNConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Feed-forward output (B, T, C) of the normalised input."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))
        return output


class Block(nn.Module):
    """x + attention(n) + feed_forward(n), with n = input_norm(x)."""

    def __init__(self, config: OMNConfig) -> None:
        super().__init__()
        self.activation_checkpointing = config.activation_checkpointing
        self.input_norm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTC: Tensor, cosine_TD: Tensor, sine_TD: Tensor) -> Tensor:
        """The residual stream (B, T, C) after this block."""
        # Checkpointing here, inside the block, keeps its FSDP2 hooks out of the recomputation.
        if self.activation_checkpointing and torch.is_grad_enabled():
            recomputed: Tensor = checkpoint(self._compute, x_BTC, cosine_TD, sine_TD, use_reentrant=False, preserve_rng_state=False)
            return recomputed
        return self._compute(x_BTC, cosine_TD, sine_TD)

    def _compute(self, x_BTC: Tensor, cosine_TD: Tensor, sine_TD: Tensor) -> Tensor:
        normalised_BTC = self.input_norm(x_BTC)
        output: Tensor = x_BTC + self.attention(normalised_BTC, cosine_TD, sine_TD) + self.feed_forward(normalised_BTC)
        return output


class OMN(nn.Module):
    """The OMN language model.

    Build it on any device, then call :meth:`initialize_weights`. It has no buffers: its parameters
    are its whole state. With FSDP2, build it on the meta device, then call ``shard_model``,
    ``to_empty`` and ``initialize_weights``.
    """

    def __init__(self, config: OMNConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._tie_head()

    def _tie_head(self) -> None:
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Leaving the meta device makes new parameters, one for each module, which unties the head.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie_head()
        return self

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits, or with targets the mean cross-entropy.

        Args:
            tokens_BT: token ids, int64, on the device of the model.
            targets_BT: the token id that follows each position, int64; -100 leaves a position out.

        Returns:
            logits (B, T, V) in the dtype of the head's product, or a scalar in nats, fp32. The loss
            is computed inside forward, where FSDP2 has gathered the head.
        """
        cosine_TD, sine_TD = rotary_tables(tokens_BT.shape[1], self.config.head_dim, self.config.rope_theta, tokens_BT.device)
        x_BTC = self.embed_tokens(tokens_BT)
        for block in self.layers:
            x_BTC = block(x_BTC, cosine_TD, sine_TD)
        logits_BTV: Tensor = self.lm_head(self.norm(x_BTC))
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())

    @torch.no_grad()
    def initialize_weights(self, seed: int) -> None:
        """Fill all parameters from ``seed``: the same values on any device and number of ranks.

        Norm gains become 1. All other parameters are drawn from a normal distribution with standard
        deviation ``initializer_std``, each by its own CPU generator, seeded by seed and parameter
        name. For the o and down projections the deviation is divided by sqrt(2 * num_layers): they
        add to the residual stream 2 * num_layers times, and so their sum has the same size at any
        depth. Each rank draws one full parameter at a time and keeps its shard. Not collective.
        """
        for name, parameter in self.named_parameters():
            _assign(parameter, self._initial_value(name, parameter, seed))

    def _initial_value(self, name: str, parameter: nn.Parameter, seed: int) -> Tensor:
        if parameter.ndim == 1:
            return torch.ones(parameter.shape)
        std = self.config.initializer_std
        if name.split(".")[-2] in _RESIDUAL_PROJECTIONS:
            std /= math.sqrt(2 * self.config.num_layers)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        return torch.empty(parameter.shape).normal_(0.0, std, generator=generator)


def _assign(parameter: Any, full: Tensor) -> None:
    """Copy ``full`` (CPU, fp32, global shape) into a plain or sharded parameter; not collective."""
    if isinstance(parameter, DTensor):
        # All ranks have the same full tensor: src_data_rank=None cuts it without communication.
        full = full.to(parameter.device)
        sharded = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(sharded.to_local())
    else:
        parameter.copy_(full)
