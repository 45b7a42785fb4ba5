"""The command line: ``omn-dist train | launch | submit | env | routes | plan | data prepare``.

Exit status: 0 done; 1 the run failed; 2 wrong input, explained in one line on stderr; 75 the run
was asked to stop and saved a checkpoint. Under a launcher only the first rank prints, and all ranks
exit with the same status.
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

from omn_dist.launch.job_layout import read_layout
from omn_dist.launch.report import describe_layout, describe_machine
from omn_dist.launch.start import enter_rank, machine_problems, meeting_problems, start_machine
from omn_dist.launch.submit import submit
from omn_dist.models.targets import is_model_target, meta_model
from omn_dist.optim.state_bytes import format_state_bytes
from omn_dist.roles import format_groups, route_parameters
from omn_dist.roles.algorithms import algorithm_kind
from omn_dist.roles.report import draw_routes, format_all, format_routes, json_lines
from omn_dist.settings import SettingsError
from omn_dist.studies.command import add_arguments
from omn_dist.train.config import RunConfig, load_config
from omn_dist.train.data import open_tokenizer, prepare_text
from omn_dist.train.loop import train
from omn_dist.train.meeting_point import MeetingPointError, MissingMembersError
from omn_dist.train.preflight import preflight
from omn_dist.train.ranks import check_num_gpus, read_ranks
from omn_dist.train.setup import build_groups, build_meta_model
from omn_dist.train.window import RejectedWindowsError


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all other errors of the command."""

    @override
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if "RANK" not in os.environ:
        return _run(arguments)
    # So that torchrun reports the traceback of the rank that failed first.
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
    except (SettingsError, RejectedWindowsError, MissingMembersError) as error:
        # Before the ranks have met, rank 0 cannot print for the others.
        if first or isinstance(error, (MeetingPointError, MissingMembersError)):
            print(f"omn-dist: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command.

    Overrides may come before and after options, which argparse does not allow by itself.
    """
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
        description="Train transformers that are sharded with FSDP2: Muon for matrices, AdamW for other parameters.",
    )
    parser.set_defaults(run=lambda parsed: _help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def with_config(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("config", metavar="CONFIG", help="YAML file of the run")
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as schedule.total_tokens=1000000")
        command.set_defaults(run=run)
        return command

    command = with_config("train", _train, "train a model: on all ranks under torchrun, else in this process")
    command.add_argument("--check", action="store_true", help="check everything that the run needs, and do not start it")
    command.add_argument(
        "--ranks", type=int, metavar="N", help="number of ranks to check for (default: that of the launcher, or 1)"
    )
    command = with_config("launch", _launch, "start the ranks of a run on this machine; give the same command on every machine")
    command.add_argument("--ranks-per-node", type=int, default=1, metavar="N", help="ranks on each machine (1)")
    command.add_argument(
        "--launcher",
        choices=("torchrun", "srun"),
        default="torchrun",
        help="torchrun: start the ranks; srun: this task is a rank (torchrun)",
    )
    command.add_argument("--rendezvous", choices=("static", "c10d"), default="static", help="how machines find each other (static)")
    command.add_argument(
        "--log-folder", metavar="FOLDER", help="write the output of each rank to a file (default: all on the screen)"
    )
    text = "show the role, algorithm and view of each parameter of a model; allocates no weights"
    command = commands.add_parser("routes", help=text, description=text)
    command.add_argument(
        "config",
        metavar="MODEL",
        help="YAML file of a run, hf:<model_type> (a small model of that Hugging Face type), a config.json, or module:function",
    )
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for the YAML file, such as model.num_layers=2")
    command.add_argument("--all", action="store_true", help="list every parameter, with the reason for its algorithm")
    command.add_argument("--json", action="store_true", help="print one JSON object for each parameter instead of tables")
    command.add_argument("--picture", metavar="FILE", help="also draw the number of elements of each role, as .png or .svg")
    command.set_defaults(run=_routes)
    text = "show owners, balance, traffic, memory and predicted time for numbers of ranks; allocates no weights"
    add_arguments(commands.add_parser("plan", help=text, description=text))

    text = "print the sbatch command for a job in YAML, and submit it"
    command = commands.add_parser("submit", help=text, description=text)
    command.add_argument("job", metavar="JOB", help="YAML file of the job, such as slurm/job.yaml")
    command.add_argument("--dry-run", action="store_true", help="only print the command")
    command.set_defaults(run=lambda parsed: submit(parsed.job, dry_run=parsed.dry_run))
    text = "show what this machine has, and what a run would use and why"
    command = commands.add_parser("env", help=text, description=text)
    command.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file of a run; checks whether this machine can run it")
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as schedule.total_tokens=1000000")
    command.add_argument("--ranks-per-node", type=int, default=1, metavar="N", help="ranks on each machine (1)")
    command.set_defaults(run=_environment)

    data = commands.add_parser("data", help="prepare text for training").add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    text = "tokenize text files into shards for training"
    command = data.add_parser("prepare", help=text, description=text)
    command.add_argument("paths", nargs="+", metavar="PATH", help="text files, and folders of text files")
    command.add_argument("--out", required=True, metavar="FOLDER", help="folder to write; must be empty or not exist")
    command.add_argument("--tokenizer", default="byte", metavar="NAME", help="'byte' (default), or the path of a tokenizer.json")
    command.add_argument(
        "--end-of-document", metavar="TOKEN", help="end-of-document token of the tokenizer.json (default: looked for)"
    )
    command.add_argument(
        "--validation-fraction", type=float, default=0.05, metavar="X", help="part of the text for validation (0.05)"
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the choice of validation text (0)")
    command.add_argument("--shard-tokens", type=int, default=1 << 26, metavar="N", help="tokens of a file (67,108,864)")
    command.add_argument("--format", choices=("bin", "npy"), default="bin", help="format of the files (bin)")
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
    if config.optimizer.rules:
        build_groups(config, build_meta_model(config))
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
    problems = [] if config is None else meeting_problems(layout) + machine_problems(config, layout)
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
            raise SettingsError(f"{parsed.overrides[0]!r}: expected no overrides, which change the YAML file of a run")
        model: torch.nn.Module = meta_model(parsed.config)
    else:
        config = load_config(parsed.config, parsed.overrides)
        model = build_meta_model(config)
    try:
        routes = route_parameters(model, None if config is None else config.optimizer.rules)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    for route in routes:
        if route.role in ("fused", "stack"):
            print(f"warning: {route.name} is on {algorithm_kind(route.algorithm).label}: {route.reason}", file=sys.stderr)
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
    print(format_state_bytes(groups))
    tensors: dict[float, int] = {}
    for group in groups:
        tensors[group["weight_decay"]] = tensors.get(group["weight_decay"], 0) + len(group["param_names"])
    print("weight decay in effect:", ", ".join(f"{decay:g} on {count:,} tensors" for decay, count in sorted(tensors.items())))
    decay = config.optimizer.weight_decay
    if decay and not any(group["weight_decay"] and not algorithm_kind(group["algorithm"]).takes_matrices for group in groups):
        print(f"optimizer.weight_decay: configured {decay:g}, in effect on 0 tensors, since only matrices of this model decay")


def _prepare(parsed: argparse.Namespace) -> int:
    folder = prepare_text(
        [Path(path) for path in parsed.paths],
        parsed.out,
        open_tokenizer(parsed.tokenizer, parsed.end_of_document),
        validation_fraction=parsed.validation_fraction,
        seed=parsed.seed,
        shard_tokens=parsed.shard_tokens,
        shard_format=parsed.format,
        progress=sys.stderr.isatty(),
    )
    counts = [sum(shard.num_tokens for shard in side) for side in (folder.train, folder.validation)]
    print(f"wrote {parsed.out}: {counts[0]:,} training and {counts[1]:,} validation tokens, vocabulary {folder.vocab_size:,}")
    return 0
