"""The rules by name: those of the package, and those that a program registers."""

from omn_dist.optim.rules.adamw import AdamW
from omn_dist.optim.rules.muon import Muon
from omn_dist.optim.rules.normuon import NorMuon
from omn_dist.optim.rules.rule import MatrixRule, Rule, ShardRule
from omn_dist.optim.rules.vector import Vector
from omn_dist.roles.algorithms import AlgorithmKind, register_algorithm
from omn_dist.settings import SettingsError, unknown_name

BUILT_IN: tuple[Rule, ...] = (Muon(), NorMuon(), Vector(), AdamW())
FOR_ROWS: ShardRule = AdamW()
"""The rule of rows that belong to no matrix, inside a parameter on a matrix rule."""
ROW_PREFIX = "adamw_"
"""Prefix of the fields of such rows, in the group of their parameter."""
_rules: dict[str, Rule] = {}


def register_rule(rule: Rule) -> None:
    """Make a rule known by its ``name``, as the ``algorithm`` of parameter groups and presets.

    A rule that was registered under the same name before is replaced. Every rank must register the
    same rules before it builds an optimizer. Not collective.

    Args:
        rule: an instance of a subclass of :class:`~omn_dist.optim.rules.rule.MatrixRule` or
            :class:`~omn_dist.optim.rules.rule.ShardRule`.

    Raises:
        TypeError: neither of them.
        SettingsError: the name of a rule of the package, or none.
    """
    if not isinstance(rule, MatrixRule | ShardRule):
        raise TypeError(f"rule: found {rule!r}, expected an instance of a subclass of MatrixRule or ShardRule")
    name = getattr(rule, "name", "")
    if not name or not isinstance(name, str):
        raise SettingsError(f"rule: found the name {name!r} of {type(rule).__name__}, expected a string that is not empty")
    if rule not in BUILT_IN and any(name == known.name for known in BUILT_IN):
        raise SettingsError(f"rule: found the name {name!r}, which is a rule of omn_dist, expected another one")
    _rules[name] = rule
    register_algorithm(name, AlgorithmKind(rule.label, rule.takes_matrices, _field_names(rule)))


def _field_names(rule: Rule) -> tuple[str, ...]:
    """The fields of a group on ``rule``; empty where the rule does not list them."""
    if not rule.fields:
        return ()
    rows = tuple(f"{ROW_PREFIX}{field}" for field in FOR_ROWS.fields) if rule.takes_matrices else ()
    return (*rule.fields, *rule.own_fields, *rows)


def rule_by_name(name: str) -> Rule:
    """The rule of that name; raises ``SettingsError`` with the nearest known one."""
    if not isinstance(name, str) or name not in _rules:
        raise SettingsError(unknown_name("algorithm", str(name), _rules))
    return _rules[name]


def algorithm_of(word: str, matrix_algorithm: str) -> str:
    """The rule that a group asks for by ``word``.

    ``muon`` says that parameters are matrices. Which rule that means is the choice of the preset,
    its ``algorithm``; every other word is a rule's name.
    """
    return matrix_algorithm if word == Muon.name else word


def matrix_rule(name: str) -> MatrixRule:
    """The rule of that name; raises ``SettingsError`` unless it is a :class:`MatrixRule`."""
    rule = rule_by_name(name)
    if not isinstance(rule, MatrixRule):
        raise SettingsError(f"algorithm: found {name!r}, expected one that updates matrices, such as {Muon.name!r}")
    return rule


for _rule in BUILT_IN:
    register_rule(_rule)
