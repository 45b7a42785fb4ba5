"""Time of a training iteration with DualOptimizer and with AdamW alone, interleaved in one run.

An iteration is zero_grad, forward, backward and step of an fp32 OMN transformer under
``fully_shard``, on gloo ranks with one thread each. The model has 10.0 million parameters (hidden
256, 10 layers, vocabulary 8192); a rank takes 8 sequences of 256 tokens.

*expected* is the iteration with AdamW plus the Newton-Schulz products of the slowest rank, measured
alone (floor.py) in the same round: the time of ``DualOptimizer`` if everything except the products
cost as much as with AdamW.

    python benchmarks/end_to_end.py --ranks 2 [--preset torch] [--layers 10] [--sequences 8]
        [--rounds 9] [--json]
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import on_ranks, quartiles, show, slowest, summary
from floor import Floor
from torch.distributed.device_mesh import init_device_mesh

from omn_dist import DualOptimizer, build_parameter_groups
from omn_dist.models import OMN, OMNConfig, shard_model
from omn_dist.roles.algorithms import algorithm_kind

NUM_TOKENS = 256


def model(num_layers: int) -> OMN:
    """The model, sharded over all ranks. Collective."""
    config = OMNConfig(
        num_layers=num_layers,
        hidden_size=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=688,
        vocab_size=8192,
    )
    built = shard_model(OMN(config), init_device_mesh("cpu", (dist.get_world_size(),)))
    built.initialize_weights(seed=0)
    return built


def measure(preset: str, num_layers: int, num_sequences: int, num_rounds: int) -> list[dict[str, Any]]:
    """Rows of the table. Collective."""
    ours, theirs = model(num_layers), model(num_layers)
    groups = build_parameter_groups(ours)
    matrices = {
        name: tuple(parameter.shape)
        for group in groups
        if algorithm_kind(group["algorithm"]).takes_matrices
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    contenders = {
        "DualOptimizer": (ours, DualOptimizer(groups, preset=preset)),
        "AdamW": (theirs, torch.optim.AdamW(theirs.parameters(), fused=True)),
    }
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens, targets = torch.randint(ours.config.vocab_size, (2, num_sequences, NUM_TOKENS), generator=generator)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    steps: dict[str, list[float]] = {name: [] for name in contenders}
    floor = Floor(preset, matrices)
    products = []
    for number in range(num_rounds + 1):
        # Every second round runs in reverse order, so that drift of the machine affects both.
        for name in list(contenders)[:: (-1) ** number]:
            network, optimizer = contenders[name]
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            network(tokens, targets).backward()
            before_step = time.perf_counter()
            optimizer.step()
            end = time.perf_counter()
            if number:  # the first round allocates
                times[name].append(slowest(end - start))
                steps[name].append(slowest(end - before_step))
        products.append(floor.seconds()["products"])
    expected = [adamw + product for adamw, product in zip(times["AdamW"], products[1:], strict=True)]
    ratios = [dual / whole for dual, whole in zip(times["DualOptimizer"], expected, strict=True)]
    rows = [{"name": name, **summary(times[name]), "step_ms": 1e3 * median(steps[name])} for name in contenders]
    low, middle, high = quartiles(ratios)
    rows[0] |= {"of_expected": middle, "of_expected_low": low, "of_expected_high": high}
    return [*rows, {"name": "Newton-Schulz products", **summary(products[1:])}, {"name": "expected", **summary(expected)}]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--preset", choices=("omn", "torch"), default="torch")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--sequences", type=int, default=8, help="sequences of a rank in an iteration (8)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    options = (arguments.preset, arguments.layers, arguments.sequences, arguments.rounds)
    show(on_ranks(arguments.ranks, measure, *options), arguments.json)


if __name__ == "__main__":
    main()
