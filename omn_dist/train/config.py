"""The configuration of a training run: one frozen dataclass a section, filled from YAML and ``key=value`` overrides."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from omn_dist.models import HuggingFaceConfig, OMNConfig
from omn_dist.presets import resolve_preset
from omn_dist.settings import SettingsError, from_mapping
from omn_dist.train.data import DataConfig
from omn_dist.train.precision import PrecisionConfig
from omn_dist.train.schedule import ScheduleConfig


def _require(condition: bool, name: str, found: object, expected: str) -> None:
    if not condition:
        raise SettingsError(f"{name}: found {found!r}, expected {expected}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The dual optimizer: a preset, what differs from it, and how its matrices travel."""

    preset: str = "omn"
    """Name of the recipe."""
    weight_decay: float = 0.0
    """Decay of the AdamW parameters that decay. Matrices have the preset's (override ``weight_decay``); embeddings,
    heads and norms never decay. What each group really gets is in the table of groups and in the run record."""
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the preset with another value, such as the peaks ``lr`` (Muon) and ``adamw_lr``."""
    wave_bytes: int | None = None
    """Byte budget of the matrices in flight together; null: the optimizer's own default."""
    transport: Literal["all_to_all", "all_gather"] = "all_to_all"
    """How shards reach owners and return; the bits of the result are the same."""
    overlap_backward: bool = False
    """Let directions leave for their owners while the last backward of a window goes on: the same bits, more memory."""
    teams: Literal["never", "auto"] = "never"
    """``auto``: teams of ranks work on one matrix where that is predicted to pay; other last bits than ``never``."""

    def __post_init__(self) -> None:
        _require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "a number of at least 0")
        if self.wave_bytes is not None:
            _require(self.wave_bytes > 0, "optimizer.wave_bytes", self.wave_bytes, "a positive number of bytes or null")
        if self.overlap_backward:
            _require(self.transport == "all_to_all", "optimizer.transport", self.transport, "all_to_all with overlap_backward")
        try:
            resolve_preset(self.preset, self.overrides)
        except SettingsError as error:
            raise SettingsError(f"optimizer: {error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The accumulation window: sequences that make one optimizer step."""

    global_batch: int
    """Sequences in a window, over all ranks; a multiple of the number of ranks."""
    micro_batch: int
    """Most sequences in one forward and backward pass of one rank; it divides a rank's share of the window, or is more than
    it. The passes of a window accumulate their gradients."""
    max_consecutive_rejected: int = 10
    """Windows with a non-finite loss or gradient in a row after which the run ends with an error."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch", "max_consecutive_rejected"):
            _require(getattr(self, name) >= 1, f"batch.{name}", getattr(self, name), "at least 1")

    def sequences_per_pass(self, world_size: int) -> int:
        """Sequences that a rank takes at a time: ``micro_batch``, or its whole share of the window where that is smaller."""
        return min(self.micro_batch, self.global_batch // world_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippingConfig:
    """Clipping of raw gradients. It never touches gradients of Muon, whose update does not depend on their scale."""

    adamw_max_norm: float | None = 1.0
    """Largest global norm of all AdamW gradients together; null: no clipping."""

    def __post_init__(self) -> None:
        if self.adamw_max_norm is not None:
            _require(self.adamw_max_norm > 0, "clipping.adamw_max_norm", self.adamw_max_norm, "above 0, or null")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and from which one a run starts."""

    every_steps: int | None = None
    """Steps between checkpoints; null: only at the end and on a stop signal."""
    keep: int = 2
    """Newest complete checkpoints that stay on disk."""
    resume: str = "auto"
    """``auto``: the newest complete checkpoint of the run folder, or a fresh start; ``none``: a fresh start in a run
    folder that holds no run yet; else the path of one checkpoint folder."""

    def __post_init__(self) -> None:
        if self.every_steps is not None:
            _require(self.every_steps >= 1, "checkpoint.every_steps", self.every_steps, "at least 1, or null")
        _require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")
        _require(bool(self.resume), "checkpoint.resume", self.resume, "'auto', 'none' or a path")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is measured and how often."""

    print_every_steps: int = 10
    """Steps between progress lines where there is no terminal for a progress bar."""
    update_norm_every_steps: int | None = 1
    """Steps between measurements of the update norms, which copy the parameter shards; null: never."""
    validation_every_steps: int | None = 100
    """Steps between validations; null: only at the start and at the end."""
    validation_batches: int = 8
    """Global batches in one validation, always the same ones."""

    def __post_init__(self) -> None:
        _require(self.print_every_steps >= 1, "logging.print_every_steps", self.print_every_steps, "at least 1")
        _require(self.validation_batches >= 1, "logging.validation_batches", self.validation_batches, "at least 1")
        for name in ("update_norm_every_steps", "validation_every_steps"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"logging.{name}", value, "at least 1, or null")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a training run depends on."""

    run_folder: str
    """Folder of this run: record, metrics, checkpoints, loss curve."""
    model: OMNConfig | HuggingFaceConfig
    """Sizes of the OMN transformer, or ``huggingface: <type>`` with fields of its configuration."""
    data: DataConfig
    """Where the tokens come from."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """Preset and what differs from it."""
    schedule: ScheduleConfig
    """The learning rate over accepted tokens; the peaks are the optimizer's."""
    batch: BatchConfig
    """The accumulation window."""
    clipping: ClippingConfig = dataclasses.field(default_factory=ClippingConfig)
    """Clipping of AdamW's gradients."""
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    """Dtype of the forward pass, deterministic flag."""
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    """Saving and resuming."""
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    """Metrics and validation."""
    seed: int = 0
    """Seed of the initial weights and of torch's generators."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is some, else the CPU."""
    reshard_after_forward: bool = True
    """Free the gathered weights of a block after its forward and gather them again in backward."""
    stop_after_steps: int | None = None
    """End the run at this step, checkpoint included, though the schedule is longer; null: run to ``total_tokens``."""
    stop_signals: tuple[Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"], ...] = ("SIGTERM", "SIGINT", "SIGUSR1")
    """Signals after which all ranks save a checkpoint at the end of the current window and exit with status 75."""
    collective_timeout_seconds: float = 600.0
    """Longest wait for another rank before the run ends with an error."""

    def __post_init__(self) -> None:
        _require(bool(self.run_folder), "run_folder", self.run_folder, "the path of a folder")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "a number from 0 to 2^63 - 1")
        timeout = self.collective_timeout_seconds
        _require(bool(self.stop_signals), "stop_signals", self.stop_signals, "at least one signal")
        _require(0 < timeout < float("inf"), "collective_timeout_seconds", timeout, "a positive number")
        if self.stop_after_steps is not None:
            _require(self.stop_after_steps >= 1, "stop_after_steps", self.stop_after_steps, "at least 1, or null")

    @property
    def tokens_per_window(self) -> int:
        """Tokens of one accumulation window over all ranks."""
        return self.batch.global_batch * self.data.sequence_length

    @property
    def total_steps(self) -> int:
        """Accepted windows until ``schedule.total_tokens`` is reached."""
        return -(-self.schedule.total_tokens // self.tokens_per_window)

    @property
    def last_step(self) -> int:
        """Step at which this run ends: ``total_steps``, or ``stop_after_steps`` where that comes first."""
        return self.total_steps if self.stop_after_steps is None else min(self.stop_after_steps, self.total_steps)


def check_for_world_size(config: RunConfig, world_size: int) -> None:
    """Refuse a number of ranks over which the window cannot be divided evenly.

    Raises:
        SettingsError: ``global_batch`` is not a multiple of the ranks, or a rank's share not one of ``micro_batch``.
    """
    batch = config.batch
    share, rest = divmod(batch.global_batch, world_size)
    if rest:
        raise SettingsError(
            f"batch.global_batch: found {batch.global_batch} on {world_size} ranks, expected a multiple of the ranks; "
            "change the batch or the number of ranks"
        )
    if share % batch.sequences_per_pass(world_size):
        raise SettingsError(
            f"batch.micro_batch: found {batch.micro_batch} for {share} sequences a rank (global_batch {batch.global_batch} on "
            f"{world_size} ranks), expected a divisor of {share}; change one of them"
        )


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply ``a.b=value`` overrides (values parsed as YAML) and check everything that needs no run.

    Raises:
        SettingsError: no such file, YAML that does not parse, a key given twice, an unknown or missing key, a value of
            the wrong type or out of range.
    """
    values = read_yaml(Path(path))
    for override in overrides:
        _apply_override(values, override)
    return from_mapping(RunConfig, values)


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested JSON types: what the run record and checkpoints store."""
    mapping: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return mapping


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, with a key that is given twice an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise SettingsError(f"{source}{place}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; a key that is given twice is an error.

    Raises:
        SettingsError: no such file, or something else in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SettingsError(f"{path}: cannot read the configuration: {reason}; give the path of a YAML file") from None
    values = _parse_yaml(text, str(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise SettingsError(f"{path}: found {type(values).__name__}, expected a mapping of configuration keys")
    return values


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.split(".")
    if not separator or not all(parts):
        raise SettingsError(f"override {override!r}: expected key=value, such as schedule.total_tokens=1000000")
    for position, part in enumerate(parts[:-1]):
        inner = values.setdefault(part, {})
        if inner is None:
            inner = values[part] = {}
        if not isinstance(inner, dict):
            raise SettingsError(f"override {override!r}: {'.'.join(parts[: position + 1])} is a value, not a section")
        values = inner
    values[parts[-1]] = _parse_yaml(text, f"override {key!r}")
