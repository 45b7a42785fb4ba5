"""The command line: ``omn-dist train | launch | submit | env | routes | plan | data prepare``.

Exit status: 0 done, 1 the run failed, 2 wrong input (one line on stderr says what), 75 the run saved a checkpoint
because it was asked to stop. Under a launcher only the first rank prints, and every rank exits alike.
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

from omn_dist._state_bytes import format_state_bytes
from omn_dist.launch.layout import read_layout
from omn_dist.launch.report import describe_layout, describe_machine
from omn_dist.launch.start import enter_rank, machine_problems, start_machine
from omn_dist.launch.submit import submit
from omn_dist.presets import resolve_preset
from omn_dist.roles import format_groups, route_parameters
from omn_dist.roles.report import draw_routes, format_all, format_routes, json_lines
from omn_dist.roles.targets import is_model_target, meta_model
from omn_dist.settings import SettingsError
from omn_dist.studies.command import add_arguments
from omn_dist.train.config import RunConfig, load_config
from omn_dist.train.data import prepare
from omn_dist.train.loop import train
from omn_dist.train.preflight import preflight
from omn_dist.train.ranks import check_num_gpus, read_ranks
from omn_dist.train.setup import build_groups, build_meta_model
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
    command = with_config("launch", _launch, "start this machine's ranks of a run; the same command on every machine")
    command.add_argument("--ranks-per-node", type=int, default=1, metavar="N", help="ranks on each machine (1)")
    command.add_argument("--launcher", choices=("torchrun", "srun"), default="torchrun", help="srun: this task is a rank")
    command.add_argument("--rendezvous", choices=("static", "c10d"), default="static", help="of torchrun's agents (static)")
    command.add_argument("--log-folder", metavar="FOLDER", help="for the output of each rank (default: none, all on screen)")
    text = "which role, algorithm and view each parameter of a model gets, with counts; builds no weights"
    command = commands.add_parser("routes", help=text, description=text)
    command.add_argument(
        "config",
        metavar="MODEL",
        help="YAML file of a run, hf:<model_type> (a small model of that Hugging Face type), a config.json, or module:function",
    )
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the YAML file, such as model.num_layers=2")
    command.add_argument("--all", action="store_true", help="every parameter with the reason of its route")
    command.add_argument("--json", action="store_true", help="one JSON object a parameter instead of tables")
    command.add_argument("--picture", metavar="FILE", help="also draw the elements of each role into a .png or .svg")
    command.set_defaults(run=_routes)
    text = "owners, balance, traffic, memory and predicted time over numbers of ranks; builds no weights"
    add_arguments(commands.add_parser("plan", help=text, description=text))

    text = "print the sbatch command of a job's YAML, and submit it"
    command = commands.add_parser("submit", help=text, description=text)
    command.add_argument("job", metavar="JOB", help="YAML file of the job, such as slurm/job.yaml")
    command.add_argument("--dry-run", action="store_true", help="only print")
    command.set_defaults(run=lambda parsed: submit(parsed.job, dry_run=parsed.dry_run))
    text = "what this machine offers, and what a run would use of it and why"
    command = commands.add_parser("env", help=text, description=text)
    command.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file of a run to check this machine for")
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for the configuration")
    command.add_argument("--ranks-per-node", type=int, default=1, metavar="N", help="ranks on each machine (1)")
    command.set_defaults(run=_environment)

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


def _launch(parsed: argparse.Namespace) -> int:
    if parsed.launcher == "torchrun":
        return start_machine(
            parsed.config,
            parsed.overrides,
            ranks_per_node=parsed.ranks_per_node,
            rendezvous=parsed.rendezvous,
            log_folder=None if parsed.log_folder is None else Path(parsed.log_folder),
        )
    status = enter_rank(parsed.config, parsed.overrides, ranks_per_node=parsed.ranks_per_node)
    return main(["train", parsed.config, *parsed.overrides]) if status is None else status


def _environment(parsed: argparse.Namespace) -> int:
    layout = read_layout(os.environ, parsed.ranks_per_node)
    config = None if parsed.config is None else load_config(parsed.config, parsed.overrides)
    print("\n".join(describe_machine() + describe_layout(layout, None if config is None else Path(config.run_folder))))
    problems = [] if config is None else machine_problems(config, layout)
    for problem in problems:
        print(f"omn-dist: {problem}", file=sys.stderr)
    return 2 if problems else 0


def _routes(parsed: argparse.Namespace) -> int:
    picture = None if parsed.picture is None else Path(parsed.picture)
    if picture is not None and picture.suffix.lower() not in (".png", ".svg"):
        raise SettingsError(f"--picture: found {parsed.picture!r}, expected a file name that ends in .png or .svg")
    config = None
    if is_model_target(parsed.config):
        if parsed.overrides:
            raise SettingsError(f"{parsed.overrides[0]!r}: expected no overrides, which belong to the YAML file of a run")
        model: torch.nn.Module = meta_model(parsed.config)
    else:
        config = load_config(parsed.config, parsed.overrides)
        model = build_meta_model(config)
    try:
        routes = route_parameters(model)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    for route in routes:
        if route.role in ("fused", "stack"):
            print(f"warning: {route.name} is on AdamW: {route.reason}", file=sys.stderr)
    if parsed.json:
        print("\n".join(json_lines(routes)))
    else:
        if parsed.all:
            print(format_all(routes), end="\n\n")
        print(format_routes(routes))
        if config is not None:
            _print_groups(config, model)
    if picture is not None and not draw_routes(routes, picture):
        raise SettingsError("--picture: matplotlib is not installed; pip install 'omn-dist[plots]'")
    return 0


def _print_groups(config: RunConfig, model: torch.nn.Module) -> None:
    groups = build_groups(config, model)
    print(f"\n{format_groups(groups, model)}")
    print(f"unique parameters: {sum(parameter.numel() for parameter in model.parameters()):,}")
    print(f"state_dict entries: {len(model.state_dict())}")
    preset = resolve_preset(config.optimizer.preset, config.optimizer.overrides)
    print(format_state_bytes(groups, preset.algorithm))
    decaying = [name for group in groups if group["weight_decay"] > 0 for name in group["param_names"]]
    print(f"weight decay: configured {config.optimizer.weight_decay:g}, in effect on {len(decaying)} tensors")


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
