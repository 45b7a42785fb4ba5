"""The configuration of a training run, read from YAML and ``key=value`` overrides.

Each section of the YAML file is one frozen dataclass.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from omn_dist.models import HuggingFaceConfig, OMNConfig
from omn_dist.optim.presets import Preset, resolve_preset
from omn_dist.settings import SettingsError, from_mapping, import_module
from omn_dist.train.data import DataConfig
from omn_dist.train.precision import PrecisionConfig
from omn_dist.train.schedule import ScheduleConfig


def _require(condition: bool, name: str, found: object, expected: str) -> None:
    if not condition:
        raise SettingsError(f"{name}: found {found!r}, expected {expected}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer: a preset, the fields that differ from it, and how matrices are exchanged."""

    preset: str = "omn"
    """Name of the recipe."""
    weight_decay: float | None = None
    """Weight decay of routers, gates and convolutions, which AdamW updates; it beats
    ``overrides.adamw_weight_decay``. null: that, else the preset's. Matrices take the preset's, or
    ``overrides.weight_decay``. Embeddings, heads, norms and biases never decay. The table of groups
    and the run record show the decay of each group."""
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the preset with another value, such as the peak learning rates ``lr`` (matrices)
    and ``adamw_lr``."""
    rules: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Algorithm or fields of some parameters, by role or name pattern, such as
    ``{embedding: {lr: 0.3}, "*.wpe*": adamw}``. They beat everything else."""
    rule_modules: tuple[str, ...] = ()
    """Modules to import before the optimizer is built, such as one that calls
    ``omn_dist.register_rule``; names as in ``import NAME``."""
    wave_bytes: int | None = None
    """Byte budget of the matrices that are in flight together; null: the optimizer's default."""
    transport: Literal["all_to_all", "all_gather"] = "all_to_all"
    """Collective that moves shards to owners and updates back. Results do not depend on it."""
    overlap_backward: bool = False
    """Send each wave as soon as its gradients are reduced, during the last backward of a window:
    the same bits, more memory."""
    teams: Literal["never", "auto"] = "never"
    """``auto``: several ranks work on one matrix where the prediction says that it is faster.
    Results then differ from ``never`` in the last bits."""
    batch_invariant: bool = True
    """Whether results are the same on any number of ranks, whichever matrices one rank owns.
    False is faster for many small matrices; results then repeat on the same number of ranks."""
    kernels: Literal["auto", "torch"] = "auto"
    """``auto``: the fastest kernels that give the same bits on this machine; ``torch``: torch's
    operations only."""

    def __post_init__(self) -> None:
        # First, because a preset may name an algorithm that one of these modules registers.
        for module in self.rule_modules:
            import_module(module, path="optimizer.rule_modules")
        decay = self.weight_decay
        _require(decay is None or decay >= 0, "optimizer.weight_decay", decay, "a number of at least 0, or null")
        if self.wave_bytes is not None:
            _require(self.wave_bytes > 0, "optimizer.wave_bytes", self.wave_bytes, "a positive number of bytes or null")
        if self.overlap_backward:
            _require(self.transport == "all_to_all", "optimizer.transport", self.transport, "all_to_all with overlap_backward")
        try:
            self.recipe()
        except SettingsError as error:
            raise SettingsError(f"optimizer: {error}") from None

    def fields(self) -> dict[str, Any]:
        """The fields of the preset with another value, ``weight_decay`` among them."""
        decay = {} if self.weight_decay is None else {"adamw_weight_decay": self.weight_decay}
        return {**self.overrides, **decay}

    def recipe(self) -> Preset:
        """The preset with these fields."""
        return resolve_preset(self.preset, self.fields())


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The accumulation window: the sequences of one optimizer step."""

    global_batch: int
    """Sequences of a window, over all ranks; a multiple of the number of ranks."""
    micro_batch: int
    """Largest number of sequences in one forward and backward pass of one rank. It divides a
    rank's share of the window, or is larger than it. The passes accumulate their gradients."""
    max_consecutive_rejected: int = 10
    """The run ends with an error after this many windows in a row with a non-finite loss or
    gradient."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch", "max_consecutive_rejected"):
            _require(getattr(self, name) >= 1, f"batch.{name}", getattr(self, name), "at least 1")

    def sequences_per_pass(self, world_size: int) -> int:
        """Sequences of one pass of a rank: ``micro_batch``, or the rank's whole share of the window
        where that is smaller."""
        return min(self.micro_batch, self.global_batch // world_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippingConfig:
    """Clipping of raw gradients. Muon's are never clipped: its update ignores their scale."""

    adamw_max_norm: float | None = 1.0
    """Largest global norm of the gradients of AdamW, and of every other rule whose update depends
    on the scale of its gradients, all together; null: no clipping."""

    def __post_init__(self) -> None:
        if self.adamw_max_norm is not None:
            _require(self.adamw_max_norm > 0, "clipping.adamw_max_norm", self.adamw_max_norm, "above 0, or null")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and from which one a run starts."""

    every_steps: int | None = None
    """Steps between checkpoints; null: only at the end and on a stop signal."""
    keep: int = 2
    """Number of complete checkpoints that stay on disk, the newest ones."""
    resume: str = "auto"
    """Where a fresh run folder starts: ``none``: from initial weights; the path of a checkpoint
    folder: from there; ``auto``: from initial weights, but any run in the folder is continued.
    The same command started again, by a person or by SLURM, continues from the newest complete
    checkpoint of its run folder, whatever this says. ``none`` or a path is an error where the
    folder holds a run that was started otherwise."""

    def __post_init__(self) -> None:
        if self.every_steps is not None:
            _require(self.every_steps >= 1, "checkpoint.every_steps", self.every_steps, "at least 1, or null")
        _require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")
        _require(bool(self.resume), "checkpoint.resume", self.resume, "'auto', 'none' or a path")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is measured and how often."""

    print_every_steps: int = 10
    """Steps between progress lines, where the output is no terminal with a progress bar."""
    update_norm_every_steps: int | None = 1
    """Steps between measurements of the update norms; null: never. A measurement copies the
    parameter shards for the time of a step."""
    validation_every_steps: int | None = 100
    """Steps between validations; null: only at the start and at the end."""
    validation_batches: int = 8
    """Global batches in one validation; always the same ones."""

    def __post_init__(self) -> None:
        _require(self.print_every_steps >= 1, "logging.print_every_steps", self.print_every_steps, "at least 1")
        _require(self.validation_batches >= 1, "logging.validation_batches", self.validation_batches, "at least 1")
        for name in ("update_norm_every_steps", "validation_every_steps"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"logging.{name}", value, "at least 1, or null")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a training run depends on."""

    run_folder: str
    """Folder of this run: record, metrics, checkpoints, loss curve."""
    model: OMNConfig | HuggingFaceConfig
    """Sizes of the OMN transformer, or ``huggingface: <type>`` and fields of its configuration."""
    data: DataConfig
    """Where the tokens come from."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """Preset, and the fields that differ from it."""
    schedule: ScheduleConfig
    """The learning rate over accepted tokens; the peak rates are the optimizer's."""
    batch: BatchConfig
    """The accumulation window."""
    clipping: ClippingConfig = dataclasses.field(default_factory=ClippingConfig)
    """Clipping of raw gradients."""
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    """Dtype of the forward pass, and whether kernels are deterministic."""
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    """Saving and resuming."""
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    """Metrics and validation."""
    seed: int = 0
    """Seed of the initial weights and of torch's generators."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where it is available, else the CPU."""
    reshard_after_forward: bool = True
    """Free gathered weights of a block after its forward, and gather them again in backward."""
    stop_after_steps: int | None = None
    """Save and end the run at this step, before the end of the schedule; null: run to
    ``total_tokens``."""
    stop_signals: tuple[Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"], ...] = ("SIGTERM", "SIGINT", "SIGUSR1")
    """Signals after which all ranks finish the current window, save a checkpoint, and exit with
    status 75."""
    collective_timeout_seconds: float = 600.0
    """Longest wait for another rank, after which the run ends with an error."""

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
        """Tokens of one accumulation window, over all ranks."""
        return self.batch.global_batch * self.data.sequence_length

    @property
    def total_steps(self) -> int:
        """Accepted windows until ``schedule.total_tokens`` is reached."""
        return -(-self.schedule.total_tokens // self.tokens_per_window)

    @property
    def last_step(self) -> int:
        """Step at which this run ends: ``total_steps``, or an earlier ``stop_after_steps``."""
        return self.total_steps if self.stop_after_steps is None else min(self.stop_after_steps, self.total_steps)


def check_for_world_size(config: RunConfig, world_size: int) -> None:
    """Check that the window can be divided evenly over the ranks and over the passes of a rank.

    Raises:
        SettingsError: ``global_batch`` is no multiple of the number of ranks, or a rank's share is
            no multiple of ``micro_batch``.
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
    """The checked configuration in a YAML file, with overrides.

    Imports the modules of ``optimizer.rule_modules``.

    Args:
        path: the file.
        overrides: ``a.b=value``, the value parsed as YAML; later ones win.

    Raises:
        SettingsError: no such file, YAML that does not parse, a key that is given twice, an unknown
            or missing key, or a value of the wrong type or out of range.
    """
    values = read_yaml(Path(path))
    for override in overrides:
        _apply_override(values, override)
    return from_mapping(RunConfig, values)


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested JSON types, as the run record and checkpoints store it."""
    mapping: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return mapping


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader that refuses a key that is given twice."""

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
    """The mapping in a YAML file.

    Raises:
        SettingsError: no such file, no valid YAML, no mapping, or a key that is given twice.
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
