"""The matrices of parameter groups, and a plan for them without a process group."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omn_dist.algorithms.coefficients import QUINTIC
from omn_dist.optim.presets import PRESETS, Preset
from omn_dist.optim.rules.registry import algorithm_of, matrix_rule, rule_by_name
from omn_dist.plan.assign.strategies import Strategy
from omn_dist.plan.geometry.layout import SHARD_ROWS, Layout
from omn_dist.plan.geometry.matrix import Matrix
from omn_dist.plan.geometry.traffic import Transport
from omn_dist.plan.geometry.views import View
from omn_dist.plan.plan import Plan, plan_matrices


def with_work_of(matrix: Matrix, preset: Preset) -> Matrix:
    """A matrix with the work that its owner has by a preset."""
    rule = matrix_rule(preset.algorithm)
    return matrix.with_work(rule.work(rule.defaults(preset.as_fields()), matrix))


def plan_ownership(
    shapes: Mapping[str, Sequence[int]] | Iterable[Mapping[str, Any]],
    world_size: int,
    *,
    ns_steps: int = QUINTIC.ns_steps,
    wave_bytes: int | None = None,
    communication_itemsize: int = 4,
    transport: Transport = "all_to_all",
    strategy: Strategy = "flops",
    algorithm: str = "muon",
) -> Plan:
    """The plan for matrices sharded with FSDP2 over ``world_size`` ranks, without a process group.

    Args:
        shapes: names to ``(rows, columns)``, or the groups of ``build_parameter_groups``, of which
            those whose rules need owners are taken; parameters may be on the meta device.
        world_size: number of ranks of the shard axis.
        ns_steps: Newton-Schulz iterations, for the cost.
        wave_bytes: byte budget of one slot and of the stack, per rank; ``None``: as the optimizer
            chooses it.
        communication_itemsize: bytes of one element in flight: 4 for fp32, 2 for bf16.
        transport: how waves are moved.
        strategy: how owners are chosen.
        algorithm: the rule of groups on ``"muon"``, whose row numbers add to the bytes.

    Raises:
        ValueError: a shape that is no matrix, or numbers out of range.

    Not collective.
    """
    recipe = PRESETS["omn"].as_fields() | {"ns_steps": ns_steps}
    layouts: dict[tuple[int, ...], Layout] = {}

    def found(name: str, shape: Sequence[int], group: Mapping[str, Any]) -> list[Matrix]:
        rule = matrix_rule(algorithm_of(group.get("algorithm", algorithm), algorithm))
        whole = tuple(shape)
        layout = layouts.setdefault(whole, Layout(whole, (world_size,), (SHARD_ROWS,)))
        return rule.matrices(name, View.from_group(group), layout, rule.defaults(recipe) | dict(group))

    matrices: list[Matrix] = []
    if isinstance(shapes, Mapping):
        for name, shape in shapes.items():
            matrices += found(name, shape, {})
    else:
        for group in shapes:
            if rule_by_name(algorithm_of(group["algorithm"], algorithm)).needs_owner:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    matrices += found(name, parameter.shape, group)
    return plan_matrices(
        matrices,
        world_size,
        wave_bytes=wave_bytes,
        communication_itemsize=communication_itemsize,
        transport=transport,
        strategy=strategy,
    )
