"""The command line: ``omn-dist train | routes | plan | data prepare``.

Exit status: 0 done, 1 the run failed, 2 wrong input (one line on stderr says what), 75 the run saved a checkpoint
because it was asked to stop. Under torchrun only the first rank prints, and every rank exits alike.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from typing_extensions import override

from omn_dist._state_bytes import state_bytes_by_algorithm
from omn_dist.algorithms.newton_schulz import group_recipe
from omn_dist.models import OMN
from omn_dist.plan import plan_ownership
from omn_dist.presets import resolve_preset
from omn_dist.roles import format_groups
from omn_dist.settings import SettingsError
from omn_dist.train.config import RunConfig, load_config
from omn_dist.train.data import prepare
from omn_dist.train.loop import train
from omn_dist.train.preflight import preflight
from omn_dist.train.ranks import check_num_gpus, read_ranks
from omn_dist.train.setup import build_groups
from omn_dist.train.window import RejectedWindowsError


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like all others."""

    @override
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    if "RANK" not in os.environ:
        return _run(arguments)
    # torchrun's own report then shows the traceback of the rank that failed first.
    status = record(_run)(arguments)
    assert status is not None, "record returns what _run returns"
    return status


def _run(arguments: Sequence[str] | None) -> int:
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    logging.getLogger("omn_dist").setLevel(logging.INFO if first else logging.ERROR)
    try:
        parsed = _parse(arguments)
        status: int = parsed.run(parsed)
        return status
    except (SettingsError, RejectedWindowsError) as error:
        if first:
            print(f"omn-dist: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command. Overrides may stand before and after options, which argparse alone does not allow."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    if rest and ("overrides" not in parsed or any(argument.startswith("-") for argument in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="omn-dist",
        description="Train transformers with a sharded dual optimizer: Muon for matrices, AdamW for the rest.",
    )
    parser.set_defaults(run=lambda parsed: _help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def with_config(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("config", metavar="CONFIG", help="YAML file of the run")
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as schedule.total_tokens=1000000")
        command.set_defaults(run=run)
        return command

    command = with_config("train", _train, "train; under torchrun on all of its ranks, else in this process")
    command.add_argument("--check", action="store_true", help="check everything that a run needs, start nothing")
    command.add_argument("--ranks", type=int, metavar="N", help="ranks to check for (default: those of the launcher, or 1)")
    with_config("routes", _routes, "which algorithm each parameter gets, with counts; builds no weights")
    command = with_config("plan", _plan, "owners' load and traffic over numbers of ranks; builds no weights")
    command.add_argument("--ranks", default="2,8", metavar="N,N,...", help="numbers of ranks (default 2,8)")

    data = commands.add_parser("data", help="prepare text for training").add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    text = "text files to memory-mapped token shards"
    command = data.add_parser("prepare", help=text, description=text)
    command.add_argument("paths", nargs="+", metavar="PATH", help="text files, or folders of them")
    command.add_argument("--out", required=True, metavar="FOLDER", help="folder to make; must not exist or be empty")
    command.add_argument("--tokenizer", default="byte", metavar="NAME", help="'byte' (default) or a tokenizer.json")
    command.add_argument("--end-of-document", metavar="TOKEN", help="end token of the tokenizer.json (default: a usual one)")
    command.add_argument("--validation-fraction", type=float, default=0.05, metavar="X", help="share of the text (0.05)")
    command.add_argument("--seed", type=int, default=0, help="of the split into training and validation (0)")
    command.add_argument("--shard-tokens", type=int, default=1 << 26, metavar="N", help="tokens a file (67,108,864)")
    command.add_argument("--format", choices=("bin", "npy"), default="bin", help="of the shards (bin)")
    command.set_defaults(run=_prepare)
    return parser


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def _train(parsed: argparse.Namespace) -> int:
    config = load_config(parsed.config, parsed.overrides)
    ranks = read_ranks(config.device)
    if parsed.check:
        return _check(config, ranks.world_size if parsed.ranks is None else parsed.ranks)
    if parsed.ranks is not None and parsed.ranks != ranks.world_size:
        raise SettingsError(
            f"--ranks: found {parsed.ranks}, but this run has {ranks.world_size}; start ranks with torchrun, or add --check"
        )
    return train(config, ranks)


def _check(config: RunConfig, world_size: int) -> int:
    if world_size < 1:
        raise SettingsError(f"--ranks: found {world_size}, expected at least 1")
    if config.device == "cuda":
        check_num_gpus(1)
    checks = preflight(config, world_size)
    for change in checks.changes:
        print(f"differs from the checkpoint: {change}")
    start = "a fresh start" if checks.resume is None else f"continues {checks.resume.path}"
    print(f"ready: {world_size} ranks, {config.last_step} steps, {checks.data.name}, {start}, run folder {config.run_folder}")
    return 0


def _meta_model(config: RunConfig) -> OMN:
    with torch.device("meta"):
        return OMN(config.model)


def _routes(parsed: argparse.Namespace) -> int:
    config = load_config(parsed.config, parsed.overrides)
    model = _meta_model(config)
    groups = build_groups(config, model)
    print(format_groups(groups, model))
    print(f"unique parameters: {sum(parameter.numel() for parameter in model.parameters()):,}")
    print(f"state_dict entries: {len(model.state_dict())}")
    print(_state_line(groups, resolve_preset(config.optimizer.preset, config.optimizer.overrides).algorithm))
    decaying = [name for group in groups if group["weight_decay"] > 0 for name in group["param_names"]]
    print(f"weight decay: configured {config.optimizer.weight_decay:g}, in effect on {len(decaying)} tensors")
    return 0


def _plan(parsed: argparse.Namespace) -> int:
    world_sizes = _numbers(parsed.ranks)
    config = load_config(parsed.config, parsed.overrides)
    groups = build_groups(config, _meta_model(config))
    preset = resolve_preset(config.optimizer.preset, config.optimizer.overrides)
    recipe = group_recipe(vars(preset))
    wire = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(preset.wire, recipe.input_dtype)
    options: dict[str, Any] = {} if config.optimizer.wave_bytes is None else {"wave_bytes": config.optimizer.wave_bytes}
    print(f"{'ranks':>6}  {'waves':>6}  {'max/mean':>8}  {'GFLOP max':>10}  {'MiB sent max':>12}  hash")
    for world_size in world_sizes:
        plan = plan_ownership(
            groups,
            world_size,
            algorithm=preset.algorithm,
            recipe=recipe,
            wire_itemsize=wire.itemsize,
            transport=config.optimizer.transport,
            **options,
        )
        print(
            f"{world_size:>6}  {len(plan.waves):>6}  {plan.imbalance:>8.4f}  {plan.flops_by_rank.max() / 1e9:>10.1f}  "
            f"{plan.bytes_sent_by_rank.max() / 2**20:>12.1f}  {plan.hash[:12]}"
        )
    print(_state_line(groups, preset.algorithm))
    return 0


def _state_line(groups: Sequence[dict[str, Any]], matrix_algorithm: str) -> str:
    by_algorithm = state_bytes_by_algorithm(groups, matrix_algorithm)
    parts = ", ".join(f"{algorithm} {count:,}" for algorithm, count in by_algorithm.items())
    return f"optimizer state bytes, all ranks together: {sum(by_algorithm.values()):,} ({parts})"


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise SettingsError(f"--ranks: found {text!r}, expected positive numbers such as 2,8,16")
    return numbers


def _prepare(parsed: argparse.Namespace) -> int:
    folder = prepare(
        [Path(path) for path in parsed.paths],
        parsed.out,
        parsed.tokenizer,
        end_of_document=parsed.end_of_document,
        validation_fraction=parsed.validation_fraction,
        seed=parsed.seed,
        shard_tokens=parsed.shard_tokens,
        shard_format=parsed.format,
        progress=sys.stderr.isatty(),
    )
    counts = [sum(shard.num_tokens for shard in side) for side in (folder.train, folder.validation)]
    print(f"wrote {parsed.out}: {counts[0]:,} training and {counts[1]:,} validation tokens, vocabulary {folder.vocab_size:,}")
    return 0
