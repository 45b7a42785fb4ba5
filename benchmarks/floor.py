"""A lower bound of an optimizer step's time, from parts measured on this machine in the same run.

It is the sum of three terms, because CPU ranks compute and communicate on the same cores:

- the matrix products of the slowest rank, alone, with all ranks busy. For each shape the faster of
  one batched call and calls one by one counts;
- one read and one write of all parameter and momentum shards, as a copy with all ranks busy;
- the all-to-alls of the plan, alone, on buffers of their own.

    python benchmarks/floor.py --ranks 2 [--preset torch] [--json]
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import MATRICES, on_ranks, show, slowest

from omn_dist import plan_ownership
from omn_dist.exchange.route import wave_route
from omn_dist.exchange.transport import AllToAll

NUM_ROUNDS = 5


class Floor:
    """The three parts of the bound, ready to be timed. Collective."""

    def __init__(self, preset: str, matrices: Mapping[str, tuple[int, int]] = MATRICES) -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        dtype = torch.bfloat16 if preset == "torch" else torch.float32
        plan = plan_ownership(matrices, world_size, communication_itemsize=dtype.itemsize)
        owned = Counter(
            tuple(sorted((matrix.num_rows, matrix.num_columns)))
            for matrix, owner in zip(plan.matrices, plan.owners, strict=True)
            if owner == rank
        )
        stacks = [torch.randn(count, *shape).mul_(0.01).to(dtype) for shape, count in sorted(owned.items())]
        forms = [min((_batched, _one_by_one), key=lambda form: _fastest(partial(form, stack))) for stack in stacks]
        self._products = [partial(form, stack) for form, stack in zip(forms, stacks, strict=True)]
        num_state_bytes = 2 * 4 * sum(matrix.num_elements for matrix in plan.matrices) // world_size
        self._source = torch.zeros(num_state_bytes // 4)
        self._target = torch.empty_like(self._source)
        routes = [wave_route(plan, rank, wave) for wave in plan.waves] if world_size > 1 else []
        self._transport = AllToAll(plan, routes, dist.group.WORLD) if routes else None  # type: ignore[arg-type]
        self._buffers = [
            [
                torch.zeros(layout.num_bytes, dtype=torch.uint8)
                for layout in (route.gather.sent, route.gather.received, route.scatter.sent, route.scatter.received)
            ]
            for route in routes
        ]

    def seconds(self) -> dict[str, float]:
        """Seconds of the terms on the slowest rank, each run once, and their sum. Collective."""

        def products() -> None:
            for run in self._products:
                run()

        work = {
            "products": products,
            "copies": lambda: self._target.copy_(self._source),
            "all_to_alls": self._all_to_alls,
        }
        terms = {name: slowest(_timed(function)) for name, function in work.items()}
        return {**terms, "floor": sum(terms.values())}

    def _all_to_alls(self) -> None:
        if self._transport is None:
            return
        for number, (out, back, sent, received) in enumerate(self._buffers):
            self._transport.gather(number, out, back).wait()
            self._transport.scatter(number, sent, received).wait()


def floor_seconds(preset: str, matrices: Mapping[str, tuple[int, int]] = MATRICES) -> dict[str, float]:
    """Medians over ``NUM_ROUNDS`` of the terms for ``matrices`` and of their sum. Collective."""
    floor = Floor(preset, matrices)
    rounds = [floor.seconds() for _ in range(NUM_ROUNDS)]
    return {name: statistics.median(terms[name] for terms in rounds) for name in rounds[0]}


def _timed(function: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _fastest(function: Callable[[], Any]) -> float:
    return slowest(min(_timed(function) for _ in range(NUM_ROUNDS)))


def _batched(stack: torch.Tensor) -> None:
    for _ in range(5):
        gram = stack @ stack.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
        torch.baddbmm(stack, polynomial, stack, beta=3.4445)


def _one_by_one(stack: torch.Tensor) -> None:
    for matrix in stack:
        for _ in range(5):
            gram = matrix @ matrix.mT
            polynomial = torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
            torch.addmm(matrix, polynomial, matrix, beta=3.4445)


def main() -> None:
    """Print the terms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--preset", choices=("omn", "torch"), default="torch")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    terms = on_ranks(arguments.ranks, floor_seconds, arguments.preset)
    show([{"name": name, "ms": 1e3 * seconds} for name, seconds in terms.items()], arguments.json)


if __name__ == "__main__":
    main()
