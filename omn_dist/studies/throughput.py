"""Throughput of finished runs over numbers of ranks.

``python -m omn_dist.studies.throughput RUN_FOLDER ...`` prints it from the metrics of the runs.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from omn_dist.train.metrics import read_rows
from omn_dist.train.preflight import METRICS, RECORD


def throughput_table(folders: Sequence[Path]) -> list[str]:
    """One line a run: machines, ranks, and median tokens per second with the 10 and 90 % quantiles.

    *per rank* compares tokens per second and rank with those of the first run. The first quarter of
    the steps is left out: it allocates memory and compiles kernels.
    """
    lines = [f"{'machines':>8}  {'ranks':>5}  {'tokens/s':>12}  {'10 % - 90 %':>25}  {'per rank':>8}"]
    first: float | None = None
    for folder in folders:
        ranks = json.loads((folder / RECORD).read_text(encoding="utf-8"))["ranks"]
        rates = [row["tokens_per_second"] for row in read_rows(folder / METRICS) if row["kind"] == "train"]
        rates = rates[len(rates) // 4 :]
        median = statistics.median(rates)
        low, *_, high = statistics.quantiles(rates, n=10) if len(rates) > 1 else (median, median)
        first = median / len(ranks) if first is None else first
        machines = len({rank["host"] for rank in ranks})
        share = median / len(ranks) / first
        lines.append(f"{machines:>8}  {len(ranks):>5}  {median:>12,.0f}  {f'{low:,.0f} - {high:,.0f}':>25}  {share:>8.1%}")
    return lines


if __name__ == "__main__":
    print("\n".join(throughput_table([Path(argument) for argument in sys.argv[1:]])))
