"""Options of the optimizer beside the recipe: how the work is divided and carried out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from omn_dist.kernels import KernelChoice
from omn_dist.plan.geometry.placement import Copies
from omn_dist.plan.geometry.traffic import Transport
from omn_dist.settings import SettingsError, unknown_name

Teams = Literal["never", "auto"] | Mapping[str, Sequence[int]]
"""Which matrices teams of ranks work on: none; those for which it is predicted to pay; or these, on
these ranks of their plan."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of :class:`~omn_dist.optim.optimizer.DualOptimizer`, which describes them.

    Their values are checked when the object is made.
    """

    wave_bytes: int | None = None
    transport: Transport = "all_to_all"
    owners: Mapping[str, int] | None = None
    batch_invariant: bool = True
    copies: Copies | Literal["auto"] = "share"
    teams: Teams = "never"
    master_weights: bool = False
    verify_replicas: bool = True
    kernels: KernelChoice = "auto"

    def __post_init__(self) -> None:
        _check(self.wave_bytes is None or _is_integer(self.wave_bytes), "wave_bytes", self.wave_bytes, "a number of bytes, or None")
        for name in ("batch_invariant", "master_weights", "verify_replicas"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        _check(self.owners is None or _is_owners(self.owners), "owners", self.owners, "ranks by matrix name, or None")
        named = isinstance(self.teams, str) or _is_teams(self.teams)
        _check(named, "teams", self.teams, "'never', 'auto' or the ranks of each team by matrix name")
        _check_choice("transport", self.transport, get_args(Transport))
        _check_choice("choice of copies", self.copies, (*get_args(Copies), "auto"))
        _check_choice("choice of kernels", self.kernels, get_args(KernelChoice))
        if isinstance(self.teams, str):
            _check_choice("choice of teams", self.teams, ("never", "auto"))
        if self.owners and self.teams != "never":
            raise ValueError(
                f"teams: found {self.teams!r} together with owners for every matrix, expected one of them; give teams as a mapping"
            )

    @classmethod
    def taken_from(cls, keywords: dict[str, Any]) -> Self:
        """Take the options out of ``keywords``; what remains there are fields of a preset."""
        return cls(**{name: keywords.pop(name) for name in cls.__dataclass_fields__ if name in keywords})


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_owners(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) and _is_integer(rank) for name, rank in value.items())


def _is_teams(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(ranks, Sequence) and all(map(_is_integer, ranks)) for name, ranks in value.items()
    )


def _check(holds: bool, name: str, found: object, expected: str) -> None:
    if not holds:
        raise SettingsError(f"{name}: found {found!r}, expected {expected}")


def _check_choice(kind: str, found: Any, choices: tuple[str, ...]) -> None:
    if found not in choices:
        raise SettingsError(unknown_name(kind, str(found), choices))
