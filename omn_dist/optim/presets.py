"""Recipes as data: one frozen object with every number of an optimizer, each open to override."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from omn_dist.algorithms.coefficients import Coefficients
from omn_dist.algorithms.iteration import FormChoice
from omn_dist.algorithms.momentum import MomentumRule
from omn_dist.algorithms.newton_schulz import DtypeName, RecipeName
from omn_dist.algorithms.scale import ScaleMode
from omn_dist.optim.rules.normuon import Rescale
from omn_dist.optim.rules.registry import BUILT_IN, rule_by_name
from omn_dist.optim.rules.values import check_at_least_zero
from omn_dist.settings import SettingsError, replace, unknown_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A whole recipe: the rule of the matrices and AdamW beside it."""

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
    adamw_eps: float
    """Term added to AdamW's denominator."""
    adamw_weight_decay: float
    """Decoupled decay of the AdamW groups that bring none of their own."""
    communication_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of directions and updates in flight; ``auto``: the narrowest that loses nothing."""
    algorithm: str = "muon"
    """The rule of groups whose ``algorithm`` is ``"muon"``: that word says which parameters are
    matrices, this field which rule the recipe has for them. A registered rule's name will do."""
    schedule: str | tuple[Coefficients, ...] | None = None
    """Another schedule than the Newton-Schulz recipe's: a name, or your own triples (a, b, c)."""
    ns_steps: int | None = None
    """Another number of steps than the schedule's published one, where it is defined for any."""
    ns_dtype: DtypeName | None = None
    """Another dtype of the iteration than the recipe's; norms accumulate in fp32 always."""
    form: FormChoice = "standard"
    """Form of the iteration: ``standard``, ``gram`` or ``auto``; the last two need float32."""
    cautious_decay: bool = False
    """Whether decay leaves out the elements that the update takes away from zero."""
    spectral_cap: float | None = None
    """Largest spectral norm of an update before its shape factor, estimated by power iteration;
    ``None``: no cap."""
    stable_rank_floor: float | None = None
    """Directions of a lower stable rank are taken as they are, at Frobenius norm one; ``None``: no
    check."""
    row_beta: float = 0.95
    """NorMuon: decay rate of the second moment of rows."""
    row_eps: float = 1e-10
    """NorMuon: term added to the root of the second moment."""
    rescale: Rescale = "0.2*sqrt(m*n)/|O^|"
    """NorMuon: what the normalised update is rescaled by, named by its formula."""
    qk_clip: float | None = None
    """Threshold tau of QK-Clip for attention logits, for the training loop; ``None``: no clip."""
    own: tuple[tuple[str, Any], ...] = ()
    """Names and values of fields that only the rule ``algorithm`` has (its ``own_fields``)."""

    def __post_init__(self) -> None:
        if not rule_by_name(self.algorithm).takes_matrices:
            raise SettingsError(f"algorithm: found {self.algorithm!r}, expected one that updates matrices, such as 'muon'")
        fields = self.as_fields()
        for rule in {rule.name: rule for rule in (*BUILT_IN, rule_by_name(self.algorithm))}.values():
            rule.check(fields)
        check_at_least_zero(fields, "adamw_lr", "adamw_eps", "adamw_weight_decay")
        if self.qk_clip is not None and not self.qk_clip > 0:
            raise SettingsError(f"qk_clip: found {self.qk_clip!r}, expected a positive number, or null")
        if not all(0 <= beta < 1 for beta in self.adamw_betas):
            raise SettingsError(f"adamw_betas: found {self.adamw_betas!r}, expected two numbers in [0, 1)")

    def as_fields(self) -> dict[str, Any]:
        """All fields by name, those of ``own`` among them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | dict(self.own)


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
            adamw_eps=1e-8,
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
            adamw_eps=1e-8,
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
            adamw_eps=1e-8,
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
            adamw_eps=1e-10,
            adamw_weight_decay=0.0,
        ),
        # One rate and one decay for both algorithms: the shape factor gives the update the root
        # mean square of AdamW's.
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
            adamw_eps=1e-8,
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
            ns_steps=8,
            scale="0.2*sqrt(max(m, n))",
            adamw_lr=4.2e-4,
            adamw_betas=(0.9, 0.95),
            adamw_eps=1e-8,
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
            adamw_eps=1e-8,
            adamw_weight_decay=0.1,
            qk_clip=100.0,
        ),
    }
)


def resolve_preset(preset: str | Preset, overrides: Mapping[str, Any] | None = None, *, other_names: Sequence[str] = ()) -> Preset:
    """The preset of that name (or the given one) with ``overrides`` applied.

    Args:
        preset: a name of ``PRESETS``, or a preset.
        overrides: fields of a preset, and fields that only the rule ``algorithm`` has.
        other_names: what else a keyword may be, for the message about one that is unknown.

    Raises:
        SettingsError: an unknown preset or field (with the nearest name), or a value of the wrong
            type or range.
    """
    if isinstance(preset, str):
        if preset not in PRESETS:
            raise SettingsError(unknown_name("preset", preset, PRESETS))
        preset = PRESETS[preset]
    overrides = dict(overrides or {})
    own_fields = rule_by_name(overrides.get("algorithm", preset.algorithm)).own_fields
    own = {field: overrides.pop(field) for field in own_fields if field in overrides}
    known = [*(field.name for field in dataclasses.fields(preset)), *own_fields, *other_names]
    for name in overrides:
        if name not in known:
            raise SettingsError(unknown_name("field", name, known))
    return replace(preset, overrides | ({"own": tuple((dict(preset.own) | own).items())} if own else {}))
