"""Time of one optimizer step in two checkouts of the package, interleaved in one run.

    python benchmarks/versions.py OTHER_CHECKOUT
        [--ranks 2] [--rounds 40] [--preset torch] [--adamw]

Every checkout gets its own ranks, which stay for the whole run and wait while the other one steps.
So both see the same state of a shared machine, and the ratio of neighbouring steps counts. Build
the kernels of both first: ``pip install -e .`` in each, or
``python setup.py build_ext --inplace``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parents[1]


def rank_main(rank: int, num_ranks: int, store: str, preset: str, algorithm: str) -> None:
    """Step whenever a line comes, and answer with the seconds."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from omn_dist import DualOptimizer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    # Nothing of this folder is imported here: it may not fit the other checkout.
    matrices = json.loads(sys.stdin.readline())
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=generator).mul_(0.02) for shape in matrices.values()]
    parameters = [nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)) for whole in wholes]
    group = {"params": parameters, "param_names": list(matrices), "algorithm": algorithm}
    optimizer = DualOptimizer([group], preset=preset)
    print("ready", flush=True)
    for number, _ in enumerate(sys.stdin):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.01 * (1 + number))
            parameter.grad.to_local().add_(parameter.detach().to_local())
        dist.barrier()
        start = time.perf_counter()
        optimizer.step()
        dist.barrier()
        print(time.perf_counter() - start, flush=True)
    dist.destroy_process_group()


class Checkout:
    """The ranks of one checkout."""

    def __init__(self, folder: Path, num_ranks: int, store: Path, matrices: Mapping[str, tuple[int, int]], *recipe: str) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(folder),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), str(num_ranks), str(store), *recipe],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        self._tell(json.dumps(matrices))
        self._answers()

    def step(self) -> float:
        """Seconds of a step on the slowest rank."""
        self._tell("step")
        return max(map(float, self._answers()))

    def _tell(self, line: str) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{line}\n")
            rank.stdin.flush()

    def _answers(self) -> list[str]:
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if not all(lines):
            raise SystemExit("a rank ended; its message is above")
        return lines

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            rank.communicate()


def main() -> None:
    """The command."""
    if sys.argv[1:2] == ["--rank"]:
        rank, num_ranks, store, preset, algorithm = sys.argv[2:]
        return rank_main(int(rank), int(num_ranks), store, preset, algorithm)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the checkout to compare with, such as one of the last release")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--preset", default="torch")
    parser.add_argument("--adamw", action="store_true", help="all matrices on AdamW")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    algorithm = "adamw" if given.adamw else "muon"
    from common import MATRICES, quartiles, show

    with tempfile.TemporaryDirectory() as folder:
        both = {
            name: Checkout(path, given.ranks, Path(folder) / name, MATRICES, given.preset, algorithm)
            for name, path in (("here", HERE), ("other", given.other.resolve()))
        }
        times: dict[str, list[float]] = {name: [] for name in both}
        for number in range(given.rounds + 1):
            # Each goes first in turn.
            for name in ("here", "other") if number % 2 else ("other", "here"):
                seconds = both[name].step()
                if number:
                    times[name].append(seconds)
        for checkout in both.values():
            checkout.close()
    ratios = [here / other for here, other in zip(times["here"], times["other"], strict=True)]
    rows = [
        {"checkout": name, **dict(zip(("low_ms", "median_ms", "high_ms"), (1e3 * x for x in quartiles(found)), strict=True))}
        for name, found in times.items()
    ]
    low, median, high = quartiles(ratios)
    rows.append({"checkout": "here / other, round by round", "low_ms": low, "median_ms": median, "high_ms": high})
    show(rows, given.json)


if __name__ == "__main__":
    main()
