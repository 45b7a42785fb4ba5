"""Recipes as data: every number of an optimizer in one frozen object, each field open to an override."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from omn_dist import settings
from omn_dist.algorithms.momentum import MomentumRule
from omn_dist.algorithms.newton_schulz import RecipeName
from omn_dist.algorithms.scale import ScaleMode


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A whole recipe: the matrix algorithm and AdamW beside it."""

    name: str
    """Name in the run record."""
    lr: float
    """Peak learning rate of the matrix groups."""
    weight_decay: float
    """Decoupled decay of the matrix groups that bring none of their own."""
    momentum: float
    """Coefficient of the momentum buffer."""
    momentum_rule: MomentumRule
    """``sum``: B <- mu B + G; ``ema``: B <- mu B + (1 - mu) G."""
    nesterov: bool
    """Whether the direction looks one step ahead."""
    newton_schulz: RecipeName
    """The numeric recipe of Newton-Schulz."""
    scale: ScaleMode
    """The shape factor, named by its formula in m rows and n columns."""
    adamw_lr: float
    """Peak learning rate of the AdamW groups."""
    adamw_betas: tuple[float, float]
    """Decay rates of AdamW's two moments."""
    adamw_epsilon: float
    """Term added to AdamW's denominator."""
    adamw_weight_decay: float
    """Decoupled decay of the AdamW groups that bring none of their own."""
    wire: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of directions and updates in flight; ``auto`` takes the cheapest that loses nothing."""

    def __post_init__(self) -> None:
        for field in ("lr", "weight_decay", "momentum", "adamw_lr", "adamw_epsilon", "adamw_weight_decay"):
            value = getattr(self, field)
            if not value >= 0:
                raise settings.SettingsError(f"{field}: found {value!r}, expected a number >= 0")
        if not all(0 <= beta < 1 for beta in self.adamw_betas):
            raise settings.SettingsError(f"adamw_betas: found {self.adamw_betas!r}, expected two numbers in [0, 1)")


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "omn": Preset(
            name="omn",
            lr=0.01,
            weight_decay=0.0,
            momentum=0.95,
            momentum_rule="sum",
            nesterov=True,
            newton_schulz="omn",
            scale="sqrt(max(1, m/n))",
            adamw_lr=0.0003,
            adamw_betas=(0.90, 0.95),
            adamw_epsilon=1e-8,
            adamw_weight_decay=0.0,
        ),
        "torch": Preset(
            name="torch",
            lr=1e-3,
            weight_decay=0.1,
            momentum=0.95,
            momentum_rule="ema",
            nesterov=True,
            newton_schulz="torch",
            scale="sqrt(max(1, m/n))",
            adamw_lr=1e-3,
            adamw_betas=(0.9, 0.999),
            adamw_epsilon=1e-8,
            adamw_weight_decay=1e-2,
        ),
    }
)


def resolve_preset(preset: str | Preset, overrides: Mapping[str, Any] | None = None) -> Preset:
    """The preset of that name (or the given one) with ``overrides`` applied.

    Raises:
        SettingsError: an unknown preset or field (with the nearest name), or a value of the wrong type or range.
    """
    if isinstance(preset, str):
        if preset not in PRESETS:
            raise settings.SettingsError(settings.unknown_name("preset", preset, PRESETS))
        preset = PRESETS[preset]
    return settings.replace(preset, overrides or {})
