"""A study: one plan and its predicted step for each model, number of ranks and strategy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from omn_dist.optim.matrices import with_work_of
from omn_dist.optim.presets import PRESETS, Preset
from omn_dist.plan.assign.strategies import Strategy
from omn_dist.plan.geometry.layout import REPLICATE, SHARD_ROWS, AxisPlacement, Layout
from omn_dist.plan.geometry.matrix import Matrix
from omn_dist.plan.geometry.traffic import Transport
from omn_dist.plan.plan import Plan, plan_matrices
from omn_dist.plan.predict.devices import Device, Topology
from omn_dist.plan.predict.simulation import Timeline, simulate
from omn_dist.plan.predict.teams import TeamChoice, choose_teams
from omn_dist.settings import SettingsError
from omn_dist.studies.models import ModelShapes

# A plan of whole matrices with more imbalance than this is compared with a plan with teams.
_UNEVEN = 1.05


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is the same in all rows of a study."""

    device: Device
    """The device of each rank."""
    topology: Topology
    """How ranks are connected."""
    preset: Preset = PRESETS["omn"]
    """The recipe: its rule, and what that costs the owner of a matrix."""
    communication_itemsize: int = 4
    """Bytes of an element in flight."""
    wave_bytes: int | None = None
    """Byte budget of one slot and of the stack; ``None`` for the optimizer's default."""
    transport: Transport = "all_to_all"
    """How the rows of a wave reach their owners."""
    replicas: int = 1
    """Copies of the sharded model (HSDP). Matrices are owned by the ranks of all copies."""
    tensor: int = 1
    """Ranks of tensor parallelism, applied before FSDP2 shards the rows.

    It cuts the outputs of a matrix, or the inputs of one that follows such a matrix.
    """
    teams: Literal["never", "auto"] = "never"
    """Whether plans form teams of ranks where those save time, like the optimizer's option.

    With ``never`` rows still report what teams would do.
    """


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """One plan and its predicted step."""

    model: ModelShapes
    strategy: Strategy
    plan: Plan
    timeline: Timeline
    teams: TeamChoice | None
    """The comparison with teams, for plans whose whole matrices are uneven.

    With ``teams="auto"`` it is in effect in ``plan``.
    """

    def as_json(self) -> dict[str, Any]:
        """The row as JSON types, with times in milliseconds.

        ``bound`` is a proven lower bound of the imbalance for these matrices (and slices, if
        ``plan`` has teams).
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
                # Whether the other numbers of this row come from the plan with teams.
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


def study(models: Sequence[ModelShapes], ranks: Sequence[int], strategies: Sequence[Strategy], setting: Setting) -> list[StudyRow]:
    """One row for each combination, in the given order. Takes seconds even for thousands of ranks.

    Raises:
        SettingsError: a number of ranks that is no multiple of replicas times tensor, or a matrix
            too small for the tensor parallelism.

    Pure; not collective.
    """
    return [_row(model, world_size, strategy, setting) for model in models for world_size in ranks for strategy in strategies]


def _row(model: ModelShapes, world_size: int, strategy: Strategy, setting: Setting) -> StudyRow:
    layouts: dict[tuple[tuple[int, int], bool], Layout] = {}
    matrices = []
    for name, shape in model.matrices.items():
        key = (shape, model.row_parallel(name))
        if key not in layouts:
            layouts[key] = _mesh_layout(*key, world_size, setting)
        matrices.append(with_work_of(Matrix.whole(name, layouts[key]), setting.preset))
    plan = plan_matrices(
        matrices,
        world_size,
        wave_bytes=setting.wave_bytes,
        communication_itemsize=setting.communication_itemsize,
        transport=setting.transport,
        strategy=strategy,
    )
    teams = None
    if strategy == "flops" and plan.imbalance > _UNEVEN:
        teams = choose_teams(plan, setting.device, setting.topology, num_adamw_elements=model.num_other_elements)
        plan = teams.plan if setting.teams == "auto" else plan
    timeline = simulate(plan, setting.device, setting.topology, num_adamw_elements=model.num_other_elements)
    return StudyRow(model=model, strategy=strategy, plan=plan, timeline=timeline, teams=teams)


def _mesh_layout(shape: tuple[int, int], row_parallel: bool, world_size: int, setting: Setting) -> Layout:
    """The layout on a mesh (replicas, shards, tensor); axes of one rank are left out."""
    fixed = setting.replicas * setting.tensor
    if world_size % fixed:
        raise SettingsError(
            f"ranks: found {world_size}, expected a multiple of {fixed} (replicas {setting.replicas} x tensor {setting.tensor})"
        )
    mesh, placements = [world_size // fixed], [SHARD_ROWS]
    if setting.tensor > 1:
        mesh.append(setting.tensor)
        if row_parallel:
            placements.append(AxisPlacement("shard", 1))
        else:
            placements = [AxisPlacement("strided", 0, setting.tensor), SHARD_ROWS]
    if setting.replicas > 1:
        mesh.insert(0, setting.replicas)
        placements.insert(0, REPLICATE)
    assert math.prod(mesh) == world_size
    return Layout(shape, tuple(mesh), tuple(placements))


def loads(row: StudyRow) -> np.ndarray[Any, np.dtype[np.float64]]:
    """``[world_size]``: FLOPs of each rank as multiples of the mean."""
    flops = row.plan.flops_by_rank.astype(np.float64)
    return flops / max(float(flops.mean()), 1.0)
