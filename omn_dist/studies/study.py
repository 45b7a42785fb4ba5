"""A study: one row for each model, number of ranks and strategy, with the plan behind it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from omn_dist.algorithms.newton_schulz import RECIPES, Recipe
from omn_dist.algorithms.row_numbers import MatrixAlgorithm
from omn_dist.plan.devices import Device, Topology
from omn_dist.plan.layout import REPLICATE, SHARD_ROWS, Layout, Placement
from omn_dist.plan.matrix import Matrix
from omn_dist.plan.ownership import Plan, plan_matrices
from omn_dist.plan.simulation import Timeline, simulate
from omn_dist.plan.strategies import Strategy
from omn_dist.plan.teams import TeamChoice, choose_teams
from omn_dist.plan.traffic import Transport
from omn_dist.settings import SettingsError
from omn_dist.studies.models import ModelShapes

# With an imbalance above this by whole matrices, teams are looked at.
_UNEVEN = 1.05


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all rows of a study share."""

    device: Device
    """What each rank computes with."""
    topology: Topology
    """How ranks are connected."""
    algorithm: MatrixAlgorithm = "muon"
    """What runs on the matrices: what rides on its messages counts."""
    recipe: Recipe = RECIPES["omn"]
    """Newton-Schulz: its steps and its form."""
    guards: tuple[str, ...] = ()
    """What guards updates: a matrix with a guard keeps one owner."""
    wire_itemsize: int = 4
    """Bytes of an element in flight."""
    wave_bytes: int | None = None
    """Byte budget of one slot and of the stack; ``None`` for that of an optimizer that is given none."""
    transport: Transport = "all_to_all"
    """How waves move."""
    replicas: int = 1
    """HSDP: copies of the sharded model. The ranks of all copies share the matrices."""
    tensor: int = 1
    """Tensor parallelism: ranks that cut outputs (or, after those, inputs) before FSDP2 shards rows."""
    teams: Literal["never", "auto"] = "never"
    """As the optimizer's option: whether plans have teams of ranks where those pay. Either way a row says what they would do."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan and what it predicts."""

    model: ModelShapes
    strategy: Strategy
    plan: Plan
    timeline: Timeline
    teams: TeamChoice | None
    """Where whole matrices leave the ranks uneven: what teams would do, or do in ``plan``."""

    def as_json(self) -> dict[str, Any]:
        """The row as JSON types: bytes, seconds in milliseconds, FLOPs.

        ``bound`` is the least imbalance that these matrices, and slices where ``plan`` has teams, can have.
        """
        plan = self.plan
        mean = float(plan.flops_by_rank.mean())
        row: dict[str, Any] = {
            "model": self.model.name,
            "ranks": plan.world_size,
            "strategy": self.strategy,
            "imbalance": plan.imbalance,
            "bound": plan.bound.value / mean if mean else 1.0,
            "bound_reason": plan.bound.reason,
            "gap": plan.gap,
            "wave_imbalance": plan.wave_imbalance,
            "waves": len(plan.waves),
            "matrices": plan.num_matrices,
            "flops_per_rank": int(plan.flops_by_rank.max()),
            "bytes_sent_per_rank": int(plan.bytes_sent_by_rank.max()),
            "temporary_bytes": plan.temporary_bytes,
            "step_ms": 1e3 * self.timeline.seconds,
            "adamw_ms": 1e3 * self.timeline.adamw_seconds,
            "exposed_ms": 1e3 * float(self.timeline.exposed_seconds.max()),
            "hash": plan.hash,
        }
        if self.teams is not None:
            teamed = self.teams.teamed
            row["teams"] = {
                # Whether the other numbers of this row are those of a plan with teams.
                "executed": bool(plan.teams),
                "pays": self.teams.pays,
                "teams": len(teamed.teams),
                "imbalance": teamed.imbalance,
                "wave_imbalance": teamed.wave_imbalance,
                "bytes_sent_per_rank": int(teamed.bytes_sent_by_rank.max()),
                "temporary_bytes": teamed.temporary_bytes,
                "step_ms": 1e3 * self.teams.seconds,
                "step_ms_whole": 1e3 * self.teams.whole_seconds,
            }
        return row


def study(models: Sequence[ModelShapes], ranks: Sequence[int], strategies: Sequence[Strategy], setting: Setting) -> list[Row]:
    """All combinations, in the given order. Pure; seconds even for thousands of ranks.

    Raises:
        SettingsError: a number of ranks that the mesh does not divide, or too much tensor parallelism for a matrix.
    """
    return [_row(model, world_size, strategy, setting) for model in models for world_size in ranks for strategy in strategies]


def _row(model: ModelShapes, world_size: int, strategy: Strategy, setting: Setting) -> Row:
    layouts: dict[tuple[tuple[int, int], bool], Layout] = {}
    matrices = []
    for name, shape in model.matrices.items():
        key = (shape, model.row_parallel(name))
        if key not in layouts:
            layouts[key] = _layout(*key, world_size, setting)
        whole = Matrix.whole(name, layouts[key], setting.recipe.schedule.num_steps)
        matrices.append(whole.worked_by(setting.algorithm, setting.recipe, setting.guards))
    plan = plan_matrices(
        matrices,
        world_size,
        wave_bytes=setting.wave_bytes,
        wire_itemsize=setting.wire_itemsize,
        transport=setting.transport,
        strategy=strategy,
    )
    teams = None
    if strategy == "flops" and plan.imbalance > _UNEVEN:
        teams = choose_teams(plan, setting.device, setting.topology, num_adamw_elements=model.num_other_elements)
        plan = teams.plan if setting.teams == "auto" else plan
    timeline = simulate(plan, setting.device, setting.topology, num_adamw_elements=model.num_other_elements)
    return Row(model=model, strategy=strategy, plan=plan, timeline=timeline, teams=teams)


def _layout(shape: tuple[int, int], row_parallel: bool, world_size: int, setting: Setting) -> Layout:
    """Rows on all ranks, or the mesh (replicas, shards, tensor) with what FSDP2 on top of tensor parallelism makes of it."""
    fixed = setting.replicas * setting.tensor
    if world_size % fixed:
        raise SettingsError(
            f"ranks: found {world_size}, expected a multiple of {fixed} (replicas {setting.replicas} x tensor {setting.tensor})"
        )
    mesh, placements = [world_size // fixed], [SHARD_ROWS]
    if setting.tensor > 1:
        mesh.append(setting.tensor)
        if row_parallel:
            placements.append(Placement("shard", 1))
        else:
            placements = [Placement("strided", 0, setting.tensor), SHARD_ROWS]
    if setting.replicas > 1:
        mesh.insert(0, setting.replicas)
        placements.insert(0, REPLICATE)
    assert math.prod(mesh) == world_size
    return Layout(shape, tuple(mesh), tuple(placements))


def loads(row: Row) -> np.ndarray[Any, np.dtype[np.float64]]:
    """``[world_size]``: FLOPs of each rank as multiples of the mean."""
    flops = row.plan.flops_by_rank.astype(np.float64)
    return flops / max(float(flops.mean()), 1.0)
