"""Checks before a run takes its first step, without a process group."""

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omn_dist.settings import SettingsError
from omn_dist.train.checkpointing import SavedRun, complete_checkpoints, read_saved_run, step_of
from omn_dist.train.config import RunConfig, check_for_world_size, to_mapping
from omn_dist.train.data import BatchSource, TextData, open_data

logger = logging.getLogger("omn_dist.train")

CHECKPOINTS = "checkpoints"
"""Folder with the checkpoints, in the run folder."""
METRICS = "metrics.jsonl"
"""Metrics file, in the run folder."""
RECORD = "record.json"
"""Run record, in the run folder."""
LOSS_CURVE = "loss_curve.png"
"""Picture of the losses, in the run folder."""

# Keys that may differ between a run and the checkpoint that it continues. Nothing is logged.
_FREE = (
    "run_folder",
    "logging",
    "checkpoint",
    "stop_after_steps",
    "stop_signals",
    "collective_timeout_seconds",
    "data.path",
)
# Keys that may differ, and are logged: they change how far or how fast the run goes.
_REPORTED = (
    "schedule.total_tokens",
    "schedule.stable_until_tokens",
    "batch.micro_batch",
    "batch.max_consecutive_rejected",
    # What it changes is compared by parameter when the optimizer is loaded.
    "optimizer.weight_decay",
    "optimizer.rule_modules",
    "optimizer.wave_bytes",
    "optimizer.transport",
    "optimizer.overlap_backward",
    "optimizer.teams",
    "optimizer.batch_invariant",
    "optimizer.kernels",
    "model.activation_checkpointing",
    "reshard_after_forward",
    "device",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preflight:
    """The data and the checkpoint that the checks have opened."""

    data: TextData
    """The opened text."""
    train: BatchSource
    """Training samples, read by their number."""
    validation: BatchSource
    """Validation samples, read by their number; their order is fixed."""
    resume: SavedRun | None
    """The checkpoint to continue from; ``None`` for a fresh start."""
    changes: tuple[str, ...]
    """Allowed differences from the configuration of the checkpoint, one line each, to be logged."""


def preflight(config: RunConfig, world_size: int) -> Preflight:
    """Check the data, the sizes that must fit each other, and the run folder.

    Writes nothing. Not collective.

    Raises:
        SettingsError: the run cannot start.
    """
    check_for_world_size(config, world_size)
    data = open_data(config.data)
    if data.vocab_size > config.model.vocab_size:
        raise SettingsError(
            f"model.vocab_size: found {config.model.vocab_size}, expected at least {data.vocab_size}, the vocabulary of {data.name}"
        )
    length = config.data.sequence_length
    train = BatchSource(data.train, sequence_length=length, seed=config.data.seed)
    # A fixed seed: every run is validated on the same samples, whatever its own seeds.
    validation = BatchSource(data.validation, sequence_length=length, seed=0)
    samples = config.logging.validation_batches * config.batch.global_batch
    if samples > validation.num_sequences:
        raise SettingsError(
            f"logging.validation_batches: found {config.logging.validation_batches} of {config.batch.global_batch} "
            f"sequences = {samples}, expected at most the {validation.num_sequences} sequences of the validation text; "
            "lower it"
        )
    resume = _find_resume(config)
    changes: tuple[str, ...] = ()
    if resume is not None:
        changes = compare_configs(resume.config, to_mapping(config))
        if resume.data_fingerprint != data.fingerprint:
            raise SettingsError(
                f"data: the text of {data.name} is not the one that checkpoint {resume.path} was trained on "
                f"(fingerprint {data.fingerprint}, expected {resume.data_fingerprint}); use the same text or another "
                "run_folder"
            )
        if resume.world_size != world_size:
            changes += (f"{world_size} ranks, {resume.world_size} in the checkpoint: results can differ in the last bits",)
    return Preflight(data=data, train=train, validation=validation, resume=resume, changes=changes)


def _find_resume(config: RunConfig) -> SavedRun | None:
    """The checkpoint to continue from.

    ``checkpoint.resume`` says where a fresh run folder starts. A run folder that the same command
    has used continues from its own newest checkpoint, so that a requeued job goes on.
    """
    folder, start = Path(config.run_folder), config.checkpoint.resume
    _check_writable(folder)
    own = complete_checkpoints(folder / CHECKPOINTS)
    if start == "auto":
        return read_saved_run(own[-1]) if own else None
    if not _is_second_start(folder, start):
        _check_start(folder, start, own)
    elif own:
        logger.warning(
            "checkpoint.resume=%s is for a fresh run_folder; %s was started with it before and continues from %s; choose another "
            "run_folder for a new run",
            start,
            folder,
            own[-1].name,
        )
        return read_saved_run(own[-1])
    return None if start == "none" else read_saved_run(Path(start))


def _is_second_start(folder: Path, start: str) -> bool:
    """Whether a command with the same ``checkpoint.resume`` has started the run in ``folder``.

    SLURM starts only the same command again. Otherwise the run record says what the last start was.
    """
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0:
        return True
    return _recorded_start(folder) == start


def _recorded_start(folder: Path) -> str | None:
    try:
        start: str = json.loads((folder / RECORD).read_text(encoding="utf-8"))["configuration"]["checkpoint"]["resume"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return start


def _check_start(folder: Path, start: str, own: Sequence[Path]) -> None:
    """Check that a run from ``start`` would overwrite no other run in ``folder``."""
    if start != "none" and Path(start).resolve() in [path.resolve() for path in own]:
        newer = [path.name for path in own if step_of(path) > step_of(Path(start))]
        if newer:
            raise SettingsError(
                f"run_folder {folder}: has checkpoints newer than {Path(start).name} ({', '.join(newer)}), which a run "
                "from there would overwrite; choose another run_folder or remove them"
            )
        return
    for name in (RECORD, METRICS, CHECKPOINTS):
        if (folder / name).exists():
            before = _recorded_start(folder)
            by = "" if before is None else f", started with checkpoint.resume={before}"
            raise SettingsError(
                f"run_folder {folder}: holds a run already ({name}{by}), expected an empty one with checkpoint.resume={start}; "
                "choose another run_folder for a new run, or checkpoint.resume=auto to continue this one"
            )


def _check_writable(folder: Path) -> None:
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise SettingsError(f"run_folder {folder}: {existing} is a file, expected a folder; choose another run_folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise SettingsError(f"run_folder {folder}: {existing} is not writable; choose another run_folder")


def compare_configs(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[str, ...]:
    """Compare the configuration of a checkpoint with that of the run that continues it.

    Returns:
        The allowed differences that are logged.

    Raises:
        SettingsError: keys that must not differ do; the message has all of them with both values.
    """
    reported: list[str] = []
    refused: list[str] = []
    saved_by_key, current_by_key = dict(_leaves(saved)), dict(_leaves(current))
    for key in sorted(saved_by_key.keys() | current_by_key.keys()):
        before, now = saved_by_key.get(key), current_by_key.get(key)
        if before == now or _among(key, _FREE):
            continue
        (reported if _among(key, _REPORTED) else refused).append(f"{key} {before!r} -> {now!r}")
    if refused:
        raise SettingsError(
            f"checkpoint: saved with another configuration: {', '.join(refused)}; use the saved values, or another "
            "run_folder for a new run"
        )
    return tuple(reported)


def _leaves(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _among(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
