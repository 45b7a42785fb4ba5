"""Builds what the training loop needs: model, optimizer, data, clock, files."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from omn_dist import DualOptimizer, build_parameter_groups
from omn_dist.models import OMN, HuggingFaceConfig, LanguageModel, shard_model
from omn_dist.models.huggingface import initialized
from omn_dist.optim.groups import complete_group
from omn_dist.roles import format_groups
from omn_dist.settings import SettingsError
from omn_dist.train.checkpointing import load_checkpoint
from omn_dist.train.config import RunConfig
from omn_dist.train.metrics import MetricsFile
from omn_dist.train.norms import GroupView, view_groups
from omn_dist.train.precision import apply_precision
from omn_dist.train.preflight import METRICS, RECORD, Preflight, preflight
from omn_dist.train.ranks import Ranks, agree
from omn_dist.train.record import base_record, describe_optimizer, describe_ranks, write_record
from omn_dist.train.schedule import TokenClock

logger = logging.getLogger("omn_dist.train")


@dataclasses.dataclass(kw_only=True)
class Run:
    """A run that is ready for its next window."""

    config: RunConfig
    ranks: Ranks
    folder: Path
    """The run folder."""
    checks: Preflight
    """The opened data, and the checkpoint to continue from."""
    model: LanguageModel
    """Sharded over all ranks."""
    optimizer: DualOptimizer
    groups: tuple[GroupView, ...]
    """Parallel to ``optimizer.param_groups``."""
    peaks: tuple[float, ...]
    """Peak learning rate of each group, parallel to ``groups``."""
    row_peaks: tuple[float, ...]
    """Peak learning rate of the AdamW rows of each group; 0 where it has none."""
    clock: TokenClock
    metrics: MetricsFile | None
    """On the first rank; ``None`` on the others."""
    record: dict[str, Any]
    """The run record as written at the start; the end of the run adds its results."""

    @property
    def fresh(self) -> bool:
        """Whether the run starts from initial weights instead of a checkpoint."""
        return self.checks.resume is None


def build_meta_model(config: RunConfig) -> LanguageModel:
    """The model on the meta device: names and shapes without weights. Not collective."""
    if isinstance(config.model, HuggingFaceConfig):
        return config.model.build(torch.device("meta"))
    with torch.device("meta"):
        return OMN(config.model)


def build_model(config: RunConfig, device: torch.device) -> LanguageModel:
    """The model on ``device``, sharded over all ranks.

    The initial weights depend on the seed only. Collective: all ranks must call.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    if isinstance(config.model, HuggingFaceConfig):
        whole = initialized(config.model, config.seed).to(device)
        return shard_model(whole, mesh, reshard_after_forward=config.reshard_after_forward)
    with torch.device("meta"):
        model = OMN(config.model)
    shard_model(model, mesh, reshard_after_forward=config.reshard_after_forward)
    model.to_empty(device=device)
    model.initialize_weights(config.seed)
    return model


def build_groups(config: RunConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups of a model, which may be on any device, with every field. Not collective.

    Raises:
        SettingsError: a rule of ``optimizer.rules`` that cannot be applied.
    """
    try:
        groups = build_parameter_groups(model, rules=config.optimizer.rules)
        return [complete_group(group, config.optimizer.recipe(), 0) for group in groups]
    except SettingsError as error:
        raise SettingsError(f"optimizer: {error}") from None


def build_optimizer(config: RunConfig, model: LanguageModel) -> DualOptimizer:
    """The optimizer of a model. Collective: all ranks must call, and compare their plans."""
    settings = config.optimizer
    options: dict[str, Any] = settings.fields() | {
        "transport": settings.transport,
        "teams": settings.teams,
        "batch_invariant": settings.batch_invariant,
        "kernels": settings.kernels,
    }
    if settings.wave_bytes is not None:
        options["wave_bytes"] = settings.wave_bytes
    return DualOptimizer(build_groups(config, model), preset=settings.preset, **options)


def set_up(config: RunConfig, ranks: Ranks) -> Run:
    """Check and build everything, and load the checkpoint if there is one.

    Writes nothing until all ranks have passed the checks and loaded the checkpoint. Collective: all
    ranks must call, after :func:`~omn_dist.train.ranks.start_process_group`.

    Raises:
        SettingsError: the run cannot start. All ranks raise the same error.
    """
    checks = agree(lambda: preflight(config, ranks.world_size))
    policy = apply_precision(config.precision)
    torch.manual_seed(config.seed)
    model = build_model(config, ranks.device)
    optimizer = build_optimizer(config, model)
    groups = view_groups(optimizer.param_groups)
    peaks = tuple(float(group["lr"]) for group in optimizer.param_groups)
    row_peaks = tuple(float(group.get("adamw_lr", 0.0)) for group in optimizer.param_groups)
    clock = TokenClock()
    if checks.resume is not None:
        load_checkpoint(checks.resume, model, optimizer)
        clock = dataclasses.replace(checks.resume.clock)

    hosts = describe_ranks(ranks)
    record = base_record(config, policy) | {
        "data": {
            "name": checks.data.name,
            "fingerprint": checks.data.fingerprint,
            "training_tokens": checks.data.num_tokens,
            "training_sequences": checks.train.num_sequences,
            "validation_sequences": checks.validation.num_sequences,
        },
        "ranks": hosts,
        "optimizer": describe_optimizer(config, groups, optimizer.param_groups, peaks),
        "plans": [plan.summary() for plan in optimizer.plans],
        "resumed_from": None if checks.resume is None else str(checks.resume.path),
    }
    folder = Path(config.run_folder)
    metrics = agree(lambda: _open_files(folder, record, checks, ranks))
    logger.info("groups:\n%s", format_groups(optimizer.param_groups, model))
    return Run(
        config=config,
        ranks=ranks,
        folder=folder,
        checks=checks,
        model=model,
        optimizer=optimizer,
        groups=groups,
        peaks=peaks,
        row_peaks=row_peaks,
        clock=clock,
        metrics=metrics,
        record=record,
    )


def _open_files(folder: Path, record: dict[str, Any], checks: Preflight, ranks: Ranks) -> MetricsFile | None:
    if not ranks.is_first:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    # First the record, by which the next start knows that this one was here.
    write_record(folder / RECORD, record)
    resumed_window = None if checks.resume is None else checks.resume.clock.windows
    return MetricsFile(folder / METRICS, resumed_window=resumed_window)
