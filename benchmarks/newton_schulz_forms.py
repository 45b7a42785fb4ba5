"""Time and error of the Gram form against the standard form by aspect ratio: prints a table, and JSON with --json.

python benchmarks/newton_schulz_forms.py --short 256
"""

import argparse
import json
import statistics
import time

import torch
from torch import Tensor

from omn_dist.algorithms.coefficients import SCHEDULES
from omn_dist.algorithms.iteration import gram_flops, gram_form, standard_flops, standard_form

RATIOS = (1, 1.25, 1.5, 2, 3, 4, 8)


def timed(form: object, iterate: Tensor, schedule: object) -> float:
    """Seconds of one call; on a CPU those of the process, which other processes on the machine disturb less."""
    clock = time.perf_counter if iterate.is_cuda else time.process_time
    if iterate.is_cuda:
        torch.cuda.synchronize()
    start = clock()
    form(iterate, schedule)  # type: ignore[operator]
    if iterate.is_cuda:
        torch.cuda.synchronize()
    return clock() - start


def measure(short: int, ratio: float, name: str, device: str, repeats: int) -> dict[str, float | str]:
    """Both forms on one gaussian, in turns."""
    schedule, long = SCHEDULES[name], int(short * ratio)
    matrix = torch.randn(short, long, generator=torch.Generator().manual_seed(0))
    iterate = (matrix / matrix.norm()).to(device)
    left, values, right = torch.linalg.svd(iterate.double().cpu(), full_matrices=False)
    exact = (left * torch.from_numpy(schedule.mapped(values.numpy()))) @ right
    errors = {
        label: float((form(iterate, schedule).double().cpu() - exact).norm() / exact.norm())
        for label, form in (("standard", standard_form), ("gram", gram_form))
    }
    ratios, standards = [], []
    for _ in range(repeats):
        standard, gram = timed(standard_form, iterate, schedule), timed(gram_form, iterate, schedule)
        standards.append(standard)
        ratios.append(gram / standard)
    flops = gram_flops(short, long, schedule.num_steps) / standard_flops(short, long, schedule.num_steps)
    return {
        "schedule": name,
        "short": short,
        "long": long,
        "standard_ms": 1e3 * statistics.median(standards),
        "time_ratio": statistics.median(ratios),
        "time_ratio_low": statistics.quantiles(ratios, n=4)[0],
        "time_ratio_high": statistics.quantiles(ratios, n=4)[2],
        "flops_ratio": flops,
        "error_standard": errors["standard"],
        "error_gram": errors["gram"],
    }


def main() -> None:
    """All ratios for one short side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", type=int, default=256, help="short side (256)")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="quintic")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = [measure(arguments.short, ratio, arguments.schedule, arguments.device, arguments.repeats) for ratio in RATIOS]
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "device": name, "rows": rows}, indent=1))
        return
    print(f"torch {torch.__version__}, {name}, fp32, {arguments.schedule}, medians of {arguments.repeats} (quartiles)")
    print("| short x long | FLOPs, gram / standard | time, gram / standard | standard ms | error standard | error gram |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        spread = f"{row['time_ratio_low']:.2f} to {row['time_ratio_high']:.2f}"
        print(
            f"| {row['short']} x {row['long']} | {row['flops_ratio']:.2f} | {row['time_ratio']:.2f} ({spread}) "
            f"| {row['standard_ms']:.1f} | {row['error_standard']:.1e} | {row['error_gram']:.1e} |"
        )


if __name__ == "__main__":
    main()
