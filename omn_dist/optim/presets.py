"""Recipes as data: one frozen object with every number of an optimizer, each open to override."""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from omn_dist.algorithms.coefficients import Coefficients
from omn_dist.algorithms.iteration import FormChoice
from omn_dist.algorithms.momentum import MomentumRule
from omn_dist.algorithms.newton_schulz import DtypeName, RecipeName
from omn_dist.algorithms.scale import ScaleMode
from omn_dist.optim.rules.normuon import Rescale
from omn_dist.optim.rules.registry import BUILT_IN, ROW_PREFIX, rule_by_name
from omn_dist.optim.rules.values import check_at_least_zero
from omn_dist.settings import SettingsError, convert, replace, unknown_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A whole recipe: the rule of the matrices and AdamW beside it."""

    name: str
    """Name in the run record."""
    lr: float
    """Peak learning rate of the matrix groups that bring none of their own."""
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
    adamw_lr: float | None
    """Peak learning rate of the AdamW groups that bring none of their own; ``None``: ``lr``."""
    adamw_betas: tuple[float, float]
    """Decay rates of AdamW's two moments."""
    adamw_eps: float
    """Term added to AdamW's denominator."""
    adamw_weight_decay: float | None
    """Decoupled decay of the AdamW groups that bring none of their own; ``None``:
    ``weight_decay``."""
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
        for name, hint in typing.get_type_hints(type(self)).items():
            convert(hint, getattr(self, name), path=name)
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
        """All fields by name, those of ``own`` too. AdamW's rate and decay are numbers."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | dict(self.own)
        for name, shared in (("adamw_lr", self.lr), ("adamw_weight_decay", self.weight_decay)):
            if fields[name] is None:
                fields[name] = shared
        return fields

    def defaults(self, *, has_momentum: bool) -> dict[str, Any]:
        """What a scheduler finds in ``optimizer.defaults``: rate, decay, and momentum or betas.

        Args:
            has_momentum: whether any group has a ``momentum``; else the fields are AdamW's.
        """
        fields = self.as_fields()
        if has_momentum:
            return {name: fields[name] for name in ("lr", "weight_decay", "momentum")}
        return {name: fields[f"adamw_{name}"] for name in ("lr", "weight_decay", "betas")}


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
            adamw_lr=None,
            adamw_betas=(0.9, 0.95),
            adamw_eps=1e-8,
            adamw_weight_decay=None,
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
            adamw_lr=None,
            adamw_betas=(0.9, 0.95),
            adamw_eps=1e-8,
            adamw_weight_decay=None,
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
            adamw_lr=None,
            adamw_betas=(0.9, 0.95),
            adamw_eps=1e-8,
            adamw_weight_decay=None,
            qk_clip=100.0,
        ),
    }
)


def field_type(field: str) -> Any:
    """The annotated type of a field of a group that presets fill; ``Any`` for other fields."""
    types = typing.get_type_hints(Preset)
    # AdamW's fields have a prefix in presets, and in groups where they are for rows.
    return types.get(field.removeprefix(ROW_PREFIX), types.get(ROW_PREFIX + field.removeprefix(ROW_PREFIX), Any))


def plain_number(name: str, value: Any) -> Any:
    """Tensors of one element as their numbers, alone or in a list or tuple; others as they are.

    Raises:
        SettingsError: a tensor of more elements, or of none; ``name`` is the field.
    """
    if type(value) in (list, tuple):
        return type(value)(plain_number(name, item) for item in value)
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise SettingsError(f"{name}: found a tensor of shape {tuple(value.shape)}, expected a number or a tensor of one element")
    return value.item()


def resolve_preset(preset: str | Preset, overrides: Mapping[str, Any] | None = None, *, other_names: Sequence[str] = ()) -> Preset:
    """The preset of that name (or the given one) with ``overrides`` applied.

    Args:
        preset: a name of ``PRESETS``, or a preset.
        overrides: fields of a preset, and fields that only the rule ``algorithm`` has. A tensor of
            one element counts as its number.
        other_names: what else a keyword may be, for the message about one that is unknown.

    Raises:
        SettingsError: an unknown preset or field (with the nearest name), or a value of the wrong
            type or range.
    """
    if isinstance(preset, str):
        if preset not in PRESETS:
            raise SettingsError(unknown_name("preset", preset, PRESETS))
        preset = PRESETS[preset]
    if not isinstance(preset, Preset):
        raise SettingsError(f"preset: found {preset!r}, expected a Preset or one of {', '.join(sorted(PRESETS))}")
    overrides = {name: plain_number(name, value) for name, value in (overrides or {}).items()}
    own_fields = rule_by_name(overrides.get("algorithm", preset.algorithm)).own_fields
    own = {field: overrides.pop(field) for field in own_fields if field in overrides}
    known = [*(field.name for field in dataclasses.fields(preset)), *own_fields, *other_names]
    for name in overrides:
        if name not in known:
            raise SettingsError(unknown_name("field", name, known))
    return replace(preset, overrides | ({"own": tuple((dict(preset.own) | own).items())} if own else {}))
