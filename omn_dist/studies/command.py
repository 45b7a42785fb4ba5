"""``omn-dist plan``: owners, balance, traffic, memory and predicted step time of a model."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omn_dist.algorithms.newton_schulz import group_recipe
from omn_dist.optim.presets import Preset, resolve_preset
from omn_dist.optim.state_bytes import format_state_bytes
from omn_dist.plan.assign.strategies import STRATEGIES, Strategy, strategy_by_name
from omn_dist.plan.geometry.layout import SHARD_ROWS, Layout
from omn_dist.plan.geometry.views import View, matrices_of
from omn_dist.plan.predict.devices import DEVICES, Device, device_by_name
from omn_dist.roles.algorithms import algorithm_kind
from omn_dist.settings import SettingsError, from_mapping
from omn_dist.studies.charts import charts
from omn_dist.studies.models import MODELS, ModelShapes, load_model
from omn_dist.studies.page import html_page
from omn_dist.studies.study import Setting, study
from omn_dist.studies.tables import LEGEND, format_study, to_csv
from omn_dist.train.config import load_config
from omn_dist.train.setup import build_groups, build_meta_model


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``omn-dist plan``."""
    command.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file of a run: its model and its optimizer")
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as model.num_layers=8")
    command.add_argument(
        "--model", action="append", default=[], metavar="NAME", help=f"{', '.join(MODELS)}, a config.json or a list of shapes"
    )
    command.add_argument("--ranks", default="2,8", metavar="N,N,...", help="numbers of ranks (default 2,8)")
    command.add_argument(
        "--strategy", default="flops", metavar="NAME,...", help=f"how owners are chosen: {', '.join(STRATEGIES)}, or 'all' (flops)"
    )
    command.add_argument("--preset", default="omn", help="recipe of the optimizer: Newton-Schulz steps, communication dtype (omn)")
    command.add_argument(
        "--device", default="h100", metavar="NAME", help=f"{', '.join(DEVICES)}, or the file of a calibration (h100)"
    )
    command.add_argument("--ranks-per-node", type=int, metavar="N", help="instead of the device's usual number")
    command.add_argument("--replicas", type=int, default=1, metavar="N", help="HSDP: copies of the sharded model (1)")
    command.add_argument("--tensor", type=int, default=1, metavar="N", help="ranks of tensor parallelism below FSDP2 (1)")
    command.add_argument(
        "--teams", choices=("never", "auto"), help="teams of ranks on one matrix, where they save time (never, or as in CONFIG)"
    )
    command.add_argument(
        "--wave-mib", type=int, metavar="N", help="byte budget of a slot and of the stack (default: the optimizer's)"
    )
    command.add_argument("--json", action="store_true", help="rows as JSON on stdout, instead of tables")
    command.add_argument("--csv", metavar="FILE", help="rows as CSV")
    command.add_argument("--plot", metavar="FOLDER", help="pictures as PNG files (needs matplotlib)")
    command.add_argument("--html", metavar="FILE", help="tables and pictures in one file (needs matplotlib)")
    command.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Run the studies and print or write the results; returns the exit status."""
    models, preset, options, facts = _models(parsed)
    recipe = group_recipe(preset.as_fields())
    device = _device(parsed.device)
    topology = device.topology
    if parsed.ranks_per_node is not None:
        topology = dataclasses.replace(topology, ranks_per_node=_positive("--ranks-per-node", parsed.ranks_per_node))
    if parsed.teams is not None:
        options["teams"] = parsed.teams
    if parsed.wave_mib is not None:
        options["wave_bytes"] = _positive("--wave-mib", parsed.wave_mib) * 2**20
    setting = Setting(
        device=device,
        topology=topology,
        preset=preset,
        communication_itemsize={"float32": 4, "bfloat16": 2}.get(preset.communication_dtype, recipe.input_dtype.itemsize),
        replicas=_positive("--replicas", parsed.replicas),
        tensor=_positive("--tensor", parsed.tensor),
        **options,
    )
    budget = "the default budget" if setting.wave_bytes is None else f"{setting.wave_bytes / 2**20:.0f} MiB"
    rows = study(models, _rank_counts(parsed.ranks), _strategies(parsed.strategy), setting)
    facts += [
        f"device {device.name}: {device.source}",
        f"{topology.ranks_per_node} ranks a node, {recipe.schedule.ns_steps} Newton-Schulz steps, "
        f"{setting.communication_itemsize} bytes an element in flight, waves of {budget}; times are predictions",
    ]
    if parsed.json:
        print(json.dumps([row.as_json() for row in rows], indent=1))
    else:
        print(format_study(rows))
        print("\n" + "\n".join(f"# {line}" for line in (*facts, *LEGEND.splitlines())))
    if parsed.csv:
        _write_file(Path(parsed.csv), to_csv(rows).encode())
    if parsed.plot or parsed.html:
        pictures = charts(rows)
        for name, picture in pictures.items() if parsed.plot else ():
            _write_file(Path(parsed.plot) / f"{name}.png", picture)
        if parsed.html:
            _write_file(Path(parsed.html), html_page(rows, pictures, facts).encode())
    return 0


def _models(parsed: argparse.Namespace) -> tuple[list[ModelShapes], Preset, dict[str, Any], list[str]]:
    models = [load_model(name) for name in parsed.model]
    if parsed.config is None:
        if not models:
            raise SettingsError("plan: found no model, expected the YAML file of a run or --model, such as --model omn1")
        return models, resolve_preset(parsed.preset), {}, []
    config = load_config(parsed.config, parsed.overrides)
    groups = build_groups(config, build_meta_model(config))
    matrices: dict[str, tuple[int, int]] = {}
    others = 0
    for group in groups:
        if not algorithm_kind(group["algorithm"]).takes_matrices:
            others += sum(parameter.numel() for parameter in group["params"])
            continue
        view = View.from_group(group)
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for matrix in matrices_of(name, view, Layout(tuple(parameter.shape), (1,), (SHARD_ROWS,))):
                matrices[matrix.name] = (matrix.num_rows, matrix.num_columns)
            others += view.num_adamw_elements if view is not None else 0
    own = ModelShapes(name=Path(parsed.config).stem, matrices=matrices, num_other_elements=others, source=str(parsed.config))
    options: dict[str, Any] = {"transport": config.optimizer.transport, "teams": config.optimizer.teams}
    if config.optimizer.wave_bytes is not None:
        options["wave_bytes"] = config.optimizer.wave_bytes
    preset = config.optimizer.recipe()
    return [own, *models], preset, options, [format_state_bytes(groups, preset.algorithm)]


def _device(text: str) -> Device:
    path = Path(text)
    if path.suffix != ".json":
        return device_by_name(text)
    try:
        return from_mapping(Device, json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise SettingsError(f"{path}: {error}") from None
        raise SettingsError(f"{path}: no calibration ({error}), expected the file of a calibration") from None


def _strategies(text: str) -> Sequence[Strategy]:
    return STRATEGIES if text == "all" else [strategy_by_name(name) for name in text.split(",")]


def _rank_counts(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise SettingsError(f"--ranks: found {text!r}, expected positive numbers such as 2,8,16")
    return numbers


def _positive(option: str, number: int) -> int:
    if number < 1:
        raise SettingsError(f"{option}: found {number}, expected at least 1")
    return number


def _write_file(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written ({error.strerror or error})") from None
