"""The algorithms that a parameter group may name, each with its label and the parameters it takes.

Update rules register themselves here, so routing and tables never need to know one by name.
"""

from typing import Final, NamedTuple

from omn_dist.settings import SettingsError, unknown_name

FOR_MATRICES: Final = "muon"
"""The algorithm that a role chooses for matrices."""
FOR_OTHERS: Final = "adamw"
"""The algorithm that a role chooses for everything else."""


class AlgorithmKind(NamedTuple):
    """What routing and tables have to know about an algorithm."""

    label: str
    """Name in tables, such as ``AdamW``."""
    takes_matrices: bool
    """Whether it updates whole matrices, so that each of them needs an owner and perhaps a view."""
    fields: tuple[str, ...] = ()
    """Fields that its groups may have, for routing rules. Empty: not known, so all are taken."""


_KINDS: dict[str, AlgorithmKind] = {}


def register_algorithm(name: str, kind: AlgorithmKind) -> None:
    """Make ``name`` known as the ``algorithm`` of a parameter group, for this process.

    Registering the same kind again changes nothing.

    Raises:
        SettingsError: ``name`` is registered with another kind.
    """
    before = _KINDS.setdefault(name, kind)
    if before != kind:
        raise SettingsError(f"algorithm {name!r}: found {kind}, but it is registered as {before}; choose another name")


def algorithm_kind(name: str) -> AlgorithmKind:
    """The kind of a registered algorithm.

    Raises:
        SettingsError: no algorithm of this name; the message suggests the nearest one.
    """
    if not isinstance(name, str) or name not in _KINDS:
        raise SettingsError(unknown_name("algorithm", str(name), _KINDS))
    return _KINDS[name]


def known_algorithms() -> tuple[str, ...]:
    """The names of all registered algorithms, sorted."""
    return tuple(sorted(_KINDS))
