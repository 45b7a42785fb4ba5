"""Time of one optimizer step here and in other libraries: same matrices and ranks, interleaved.

    python benchmarks/step_time.py --ranks 2 [--rounds 7] [--json] [--only omn_dist]

Other libraries are included if they are installed (``pip install -e .[benchmarks]``).
``times_floor`` divides a step's time by the mean of the lower bounds measured before and after it
(see floor.py), as the median over rounds. In each round an optimizer without products makes five
steps, and their median counts. ``same_update`` says whether an optimizer computes Muon's update
with five standard bf16 steps on whole matrices; the time of others is that of different work.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import MATRICES, on_ranks, sharded, show, slowest, summary
from floor import Floor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from omn_dist import DualOptimizer

_SHORT_STEPS = 5
"""Steps a round of an optimizer without products: a single one of some milliseconds varies much."""

Optimizers = dict[str, tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], bool]]
"""By name: how to build it, and whether it computes the same update."""


def contenders() -> Optimizers:
    """All optimizers that are installed."""
    names = list(MATRICES)

    def ours(algorithm: str = "muon", **options: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
        return lambda parameters: DualOptimizer(
            [{"params": parameters, "param_names": names, "algorithm": algorithm}], preset="torch", **options
        )

    found: Optimizers = {
        "omn_dist": (ours(), True),
        "omn_dist, batched": (ours(batch_invariant=False), True),
        "torch.optim.Muon": (lambda parameters: torch.optim.Muon(parameters), True),
        "omn_dist, all AdamW": (ours("adamw"), False),
        "omn_dist, all AdamW, batched": (ours("adamw", batch_invariant=False), False),
        "torch.optim.AdamW, fused": (lambda parameters: torch.optim.AdamW(parameters, fused=True), False),
    }
    if importlib.util.find_spec("muon_fsdp2"):
        import muon_fsdp2

        found["muon-fsdp2"] = (lambda parameters: muon_fsdp2.Muon([{"params": parameters, "use_muon": True}]), True)
    # muonium orthogonalises with a Triton kernel.
    if importlib.util.find_spec("muonium") and torch.cuda.is_available():
        import muonium

        found["muonium"] = (
            lambda parameters: muonium.Muon(parameters, orthogonalization_strategy="newton_schulz", use_cautious_wd=False),
            True,
        )
    return found


def measure(only: list[str], num_rounds: int) -> list[dict[str, Any]]:
    """Rows of the table. Collective."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    running = {}
    for name, (build, same_update) in contenders().items():
        if not only or name in only:
            parameters = [sharded(shape, mesh) for shape in MATRICES.values()]
            running[name] = (parameters, build(parameters), same_update)
    floor = Floor("torch")
    floors: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in running}
    ratios: dict[str, list[float]] = {name: [] for name in running}
    for number in range(num_rounds + 1):
        for name, (parameters, optimizer, same_update) in running.items():
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.01 * (1 + number))
                parameter.grad.to_local().add_(parameter.detach().to_local())
            # The rate of a shared machine changes within seconds, so each step has its own bounds.
            before = floor.seconds()["floor"]
            seconds = statistics.median(_one_step(optimizer) for _ in range(1 if same_update else _SHORT_STEPS))
            least = (before + floor.seconds()["floor"]) / 2
            if number:  # the first round allocates and compiles
                floors.append(least)
                times[name].append(seconds)
                ratios[name].append(seconds / least)
    rows = [{"name": "floor", **summary(floors), "times_floor": 1.0, "same_update": True}]
    for name, (_, _, same_update) in running.items():
        rows.append(
            {
                "name": name,
                **summary(times[name]),
                "times_floor": statistics.median(ratios[name]),
                "same_update": same_update,
            }
        )
    return rows


def _one_step(optimizer: torch.optim.Optimizer) -> float:
    """Seconds of the slowest rank. Collective."""
    dist.barrier()
    start = time.perf_counter()
    optimizer.step()
    return slowest(time.perf_counter() - start)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", action="append", default=[], help="name of an optimizer to measure; may be repeated (all)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    show(on_ranks(arguments.ranks, measure, arguments.only, arguments.rounds), arguments.json)


if __name__ == "__main__":
    main()
