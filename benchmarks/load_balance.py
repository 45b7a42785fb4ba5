"""Load balance of owners over numbers of ranks, and predicted against measured steps.

All models and strategies on powers of two, as JSON, a table, and pictures in docs/results/pictures:

    python benchmarks/load_balance.py study --out docs/results

Measured and predicted steps of gloo ranks on this machine:

    python benchmarks/load_balance.py measure --ranks 2,4,8

A calibration of this machine, for omn-dist plan --device node.json:

    torchrun --nproc-per-node 8 benchmarks/load_balance.py calibrate --out node.json

JSON files contain the environment. Measured times are those of the slowest rank: medians over
steps, with quartiles.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import environment, on_ranks, slowest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from omn_dist import DualOptimizer, build_parameter_groups
from omn_dist.plan.assign.strategies import STRATEGIES
from omn_dist.plan.plan import Plan
from omn_dist.plan.predict.devices import DEVICES, Device
from omn_dist.plan.predict.simulation import simulate
from omn_dist.studies.calibration import calibrate, save_calibration
from omn_dist.studies.charts import charts
from omn_dist.studies.models import MODELS, load_model
from omn_dist.studies.study import Setting, study

# (name, width, inner width, layers), small enough for gloo ranks that share two cores.
MEASURED = (("width 256, 6 layers", 256, 688, 6), ("width 384, 4 layers", 384, 1024, 4))


def run_study(out: Path) -> None:
    """Plan all models with all strategies, on powers of two while a rank has 2 matrices or more."""
    device = DEVICES["h100"]
    setting = Setting(device=device, topology=device.topology)
    rows = []
    for name in MODELS:
        model = load_model(name)
        limit = len(model.matrices) // 4
        ranks = [2**power for power in range(1, 13) if 2**power <= min(max(2 * limit, 2), 4096)]
        start = time.perf_counter()
        # Some strategies scan all ranks for each matrix, too slow for thousands of matrices.
        found = study([model], ranks, STRATEGIES if len(model.matrices) < 1000 else ["flops"], setting)
        print(f"{name}: {len(found)} plans in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        rows += found
    pictures = out / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    table = ["| model | ranks | strategy | max/mean | bound | gap | by waves | waves |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        cell = row.as_json()
        table.append(
            f"| {cell['model']} | {cell['ranks']} | {cell['strategy']} | {cell['imbalance']:.4f} | {cell['bound']:.4f} | "
            f"{cell['gap']:.2%} | {cell['wave_imbalance']:.4f} | {cell['waves']} |"
        )
    (out / "load_balance.md").write_text("\n".join(table) + "\n")
    content = {"environment": environment(), "rows": [row.as_json() for row in rows]}
    (out / "load_balance.json").write_text(json.dumps(content, indent=1) + "\n")
    whole = charts([row for row in rows if row.strategy == "flops"])
    (pictures / "imbalance-all.png").write_bytes(whole["imbalance"])
    for name, picture in charts([row for row in rows if row.model.name == "omn1"]).items():
        (pictures / f"{name}.png").write_bytes(picture)
    print("\n".join(table))


class Blocks(nn.Module):
    """The projections of a few blocks; gradients are made up, so forward is not needed."""

    def __init__(self, width: int, inner: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "q_proj": nn.Linear(width, width, bias=False),
                    "k_proj": nn.Linear(width, width // 4, bias=False),
                    "o_proj": nn.Linear(width, width, bias=False),
                    "up_proj": nn.Linear(width, inner, bias=False),
                    "down_proj": nn.Linear(inner, width, bias=False),
                }
            )
            for _ in range(num_layers)
        )


def measure(num_steps: int) -> list[dict[str, Any]]:
    """Measured and predicted steps of each model. Collective."""
    world_size = dist.get_world_size()
    results = []
    for name, width, inner, num_layers in MEASURED:
        model = Blocks(width, inner, num_layers)
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        optimizer = DualOptimizer(build_parameter_groups(model), preset="omn")
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        (plan,) = optimizer.plans
        others = model.embedding.weight.numel()

        def predict(plan: Plan = plan, others: int = others) -> float:
            num_elements = (others + sum(matrix.num_elements for matrix in plan.matrices)) // world_size
            device = calibrate(torch.device("cpu"), repeats=1, num_elements=num_elements)
            return simulate(plan, device, num_adamw_elements=others).seconds

        for _ in range(2):
            # The first steps allocate.
            optimizer.step()
        # A calibration before and after each step, because other load on the machine changes.
        measured, predictions = [], [predict()]
        for _ in range(num_steps):
            dist.barrier()
            start = time.perf_counter()
            optimizer.step()
            measured.append(slowest(time.perf_counter() - start))
            predictions.append(predict())
        predicted = [statistics.mean(pair) for pair in itertools.pairwise(predictions)]
        errors = sorted(of_step / seconds - 1 for of_step, seconds in zip(predicted, measured, strict=True))
        quartiles = statistics.quantiles(errors, n=4)
        results.append(
            {
                "model": name,
                "ranks": world_size,
                "imbalance": plan.imbalance,
                "measured_ms": 1e3 * statistics.median(measured),
                "predicted_ms": 1e3 * statistics.median(predicted),
                "error": statistics.median(errors),
                "error_quartiles": [quartiles[0], quartiles[2]],
            }
        )
    return results


def run_measure(ranks: list[int], num_steps: int, out: Path | None) -> None:
    """Print measured and predicted steps for each number of ranks."""
    results: list[dict[str, Any]] = []
    print("| model | ranks | measured ms | predicted ms | error, median over steps (quartiles) |\n|---|---|---|---|---|")
    for world_size in ranks:
        found = on_ranks(world_size, measure, num_steps)
        results += found
        for result in found:
            low, high = result["error_quartiles"]
            print(
                f"| {result['model']} | {result['ranks']} | {result['measured_ms']:.0f} | {result['predicted_ms']:.0f} | "
                f"{result['error']:+.1%} ({low:+.1%} .. {high:+.1%}) |",
                flush=True,
            )
    if out is not None:
        out.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")


def run_calibrate(out: Path) -> None:
    """Calibrate one device, or those of all ranks of torchrun at the same time."""
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", index) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found: Device = calibrate(device, itemsizes=(4, 2))
    if int(os.environ.get("RANK", "0")) == 0:
        save_calibration(found, out)
        print(f"wrote {out}: {found}")
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("study")
    command.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("measure")
    command.add_argument("--ranks", default="2,4,8")
    command.add_argument("--steps", type=int, default=9)
    command.add_argument("--out", type=Path)
    command = commands.add_parser("calibrate")
    command.add_argument("--out", type=Path, required=True)
    parsed = parser.parse_args()
    if parsed.command == "study":
        run_study(parsed.out)
    elif parsed.command == "measure":
        run_measure([int(part) for part in parsed.ranks.split(",")], parsed.steps, parsed.out)
    else:
        run_calibrate(parsed.out)


if __name__ == "__main__":
    main()
