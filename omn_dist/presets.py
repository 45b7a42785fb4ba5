"""Recipes as data: every number of an optimizer in one frozen object, each field open to an override."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from omn_dist import settings
from omn_dist.algorithms.coefficients import Coefficients
from omn_dist.algorithms.iteration import FormChoice
from omn_dist.algorithms.momentum import MOMENTUM_RULES, MomentumRule
from omn_dist.algorithms.newton_schulz import DtypeName, RecipeName, group_recipe
from omn_dist.algorithms.normuon import RESCALES, Rescale
from omn_dist.algorithms.row_numbers import MATRIX_ALGORITHMS, MatrixAlgorithm
from omn_dist.algorithms.scale import SCALE_MODES, ScaleMode


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
    algorithm: MatrixAlgorithm = "muon"
    """What runs on groups whose ``algorithm`` is ``"muon"``: that word says which parameters are matrices, this field which
    algorithm the recipe has for them."""
    schedule: str | tuple[Coefficients, ...] | None = None
    """Another schedule than the Newton-Schulz recipe's: a name, or triples (a, b, c) of your own."""
    num_steps: int | None = None
    """Another number of steps than the schedule's published one, where it is defined for any."""
    newton_schulz_dtype: DtypeName | None = None
    """Another dtype of the iteration than the recipe's; norms accumulate in fp32 always."""
    form: FormChoice = "standard"
    """Form of the iteration: ``standard``, ``symmetric``, ``gram`` or ``auto``; the last two need an iteration in float32."""
    cautious_decay: bool = False
    """Whether decay leaves out the elements that the update takes away from zero."""
    spectral_cap: float | None = None
    """Largest spectral norm of an update before its shape factor, estimated by power iteration; ``None``: no cap."""
    stable_rank_floor: float | None = None
    """Directions of a lower stable rank are taken as they are, at Frobenius norm one; ``None``: no check."""
    row_beta: float = 0.95
    """NorMuon: decay rate of the row moment."""
    row_epsilon: float = 1e-10
    """NorMuon: term added to the root of the row moment."""
    rescale: Rescale = "0.2*sqrt(m*n)/|O^|"
    """NorMuon: what the normalised update is rescaled by, named by its formula."""
    qk_clip: float | None = None
    """Threshold tau of QK-Clip for attention logits, for the training loop; ``None``: no clip."""

    def __post_init__(self) -> None:
        for field in ("adamw_lr", "adamw_epsilon", "adamw_weight_decay"):
            _check_at_least_zero(field, getattr(self, field))
        check_group(vars(self))
        if self.qk_clip is not None and not self.qk_clip > 0:
            raise settings.SettingsError(f"qk_clip: found {self.qk_clip!r}, expected a positive number, or null")
        if not all(0 <= beta < 1 for beta in self.adamw_betas):
            raise settings.SettingsError(f"adamw_betas: found {self.adamw_betas!r}, expected two numbers in [0, 1)")


def _check_at_least_zero(field: str, value: Any) -> None:
    if not value >= 0:
        raise settings.SettingsError(f"{field}: found {value!r}, expected a number >= 0")


_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "algorithm": (*MATRIX_ALGORITHMS, "adamw", "vector"),
        "momentum_rule": MOMENTUM_RULES,
        "scale": SCALE_MODES,
        "rescale": RESCALES,
    }
)


def check_group(fields: Mapping[str, Any]) -> None:
    """Raise ``SettingsError`` for a value that no algorithm can use, in the fields of a preset or of a complete group."""
    for field, choices in _CHOICES.items():
        if field in fields and fields[field] not in choices:
            raise settings.SettingsError(settings.unknown_name(field.replace("_", " "), str(fields[field]), choices))
    for field in ("lr", "weight_decay", "row_epsilon"):
        if field in fields:
            _check_at_least_zero(field, fields[field])
    for field in ("momentum", "row_beta"):
        if field in fields and not 0 <= fields[field] <= 1:
            raise settings.SettingsError(f"{field}: found {fields[field]!r}, expected a number from 0 to 1")
    for field in ("spectral_cap", "stable_rank_floor"):
        value = fields.get(field)
        if value is not None and not value > 0:
            raise settings.SettingsError(f"{field}: found {value!r}, expected a positive number, or null")
    if "newton_schulz" in fields:
        group_recipe(fields)


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
        # The paper's form: plain EMA momentum, and a step of the root mean square that AdamW has.
        "normuon": Preset(
            name="normuon",
            algorithm="normuon",
            lr=1e-3,
            weight_decay=0.1,
            momentum=0.95,
            momentum_rule="ema",
            nesterov=False,
            newton_schulz="scaled",
            scale="1",
            rescale="0.2*sqrt(m*n)/|O^|",
            adamw_lr=1e-3,
            adamw_betas=(0.9, 0.95),
            adamw_epsilon=1e-8,
            adamw_weight_decay=0.1,
        ),
        # The published code's form: Nesterov, the norm of O kept, then Muon's shape factor.
        "normuon_code": Preset(
            name="normuon_code",
            algorithm="normuon",
            lr=0.02,
            weight_decay=0.0,
            momentum=0.95,
            momentum_rule="ema",
            nesterov=True,
            newton_schulz="scaled",
            scale="sqrt(max(1, m/n))",
            rescale="|O|/|O^|",
            adamw_lr=3e-4,
            adamw_betas=(0.9, 0.95),
            adamw_epsilon=1e-10,
            adamw_weight_decay=0.0,
        ),
        # One rate and one decay for both algorithms: the shape factor gives the update AdamW's root mean square.
        "moonlight": Preset(
            name="moonlight",
            lr=4.2e-4,
            weight_decay=0.1,
            momentum=0.95,
            momentum_rule="sum",
            nesterov=True,
            newton_schulz="scaled",
            scale="0.2*sqrt(max(m, n))",
            adamw_lr=4.2e-4,
            adamw_betas=(0.9, 0.95),
            adamw_epsilon=1e-8,
            adamw_weight_decay=0.1,
        ),
        "qwen": Preset(
            name="qwen",
            lr=4.2e-4,
            weight_decay=0.1,
            momentum=0.95,
            momentum_rule="sum",
            nesterov=True,
            newton_schulz="scaled",
            schedule="polar_express",
            num_steps=8,
            scale="0.2*sqrt(max(m, n))",
            adamw_lr=4.2e-4,
            adamw_betas=(0.9, 0.95),
            adamw_epsilon=1e-8,
            adamw_weight_decay=0.1,
        ),
        "muonclip": Preset(
            name="muonclip",
            lr=2e-4,
            weight_decay=0.1,
            momentum=0.95,
            momentum_rule="ema",
            nesterov=False,
            newton_schulz="scaled",
            schedule="cubic",
            scale="0.2*sqrt(max(m, n))",
            adamw_lr=2e-4,
            adamw_betas=(0.9, 0.95),
            adamw_epsilon=1e-8,
            adamw_weight_decay=0.1,
            qk_clip=100.0,
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
