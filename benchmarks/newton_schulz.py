"""Time and error of Newton-Schulz by form, dtype and shape, batched and one matrix at a time.

The matrices are gaussian; a CPU uses one thread. All variants of a shape are interleaved. A row is
the time of one matrix; *of standard* divides it by the standard form in the same dtype, one by one,
in the same round. Errors are relative to the schedule's polynomial of the singular values in fp64.
The optimizer refuses the Gram form in bfloat16, because of errors that gaussian matrices do not
show (docs/algorithms.md). This benchmark runs every form in both dtypes; the standard form runs by
the kernels that an optimizer would choose.

    python benchmarks/newton_schulz.py --shapes 256x256,256x512 [--forms standard,gram]
        [--schedule quintic] [--batch 4] [--device cuda] [--json]
"""

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import quartiles, show, summary
from torch import Tensor

from omn_dist.algorithms.coefficients import SCHEDULES, Schedule
from omn_dist.algorithms.iteration import gram_flops, gram_form, standard_flops
from omn_dist.algorithms.scratch import Scratch
from omn_dist.kernels import choose_kernels


def _standard_form(iterate: Tensor, schedule: Schedule) -> Tensor:
    return choose_kernels().newton_schulz(iterate, schedule, Scratch())


FORMS = {"standard": (_standard_form, standard_flops), "gram": (gram_form, gram_flops)}
DTYPES = (torch.float32, torch.bfloat16)
Variant = tuple[str, torch.dtype, bool]
"""Form, dtype, and whether one call takes all matrices."""


def measure(
    short: int, long: int, forms: list[str], schedule: Schedule, batch: int, device: str, num_rounds: int
) -> list[dict[str, Any]]:
    """The rows of one shape; the first form is the standard one."""
    stack = torch.randn(batch, short, long, generator=torch.Generator().manual_seed(0))
    stack = (stack / torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True)).to(device)
    left, values, right = torch.linalg.svd(stack.double().cpu(), full_matrices=False)
    exact = (left * torch.from_numpy(schedule.mapped(values.numpy())).unsqueeze(1)) @ right
    if device == "cpu":
        choose_kernels().warm_up([(short, long)], torch.bfloat16)
    variants: dict[Variant, Callable[[], Any]] = {}
    # Compared variants run close together, because a machine's rate changes within seconds.
    for dtype, batched, form in itertools.product(DTYPES, (False, True), forms):
        function, _ = FORMS[form]
        given = stack.to(dtype)
        all_at_once, each = partial(function, given, schedule), partial(_one_by_one, function, given, schedule)
        variants[form, dtype, batched] = all_at_once if batched else each
    errors = {
        variant: float((torch.stack(list(call())).double().cpu() - exact).norm() / exact.norm())
        for variant, call in variants.items()
    }
    times: dict[Variant, list[float]] = {variant: [] for variant in variants}
    for _ in range(num_rounds):
        for variant, call in variants.items():
            times[variant].append(_seconds(call, device) / batch)
    rows = []
    for (form, dtype, batched), seconds in times.items():
        standard = times["standard", dtype, False]
        low, middle, high = quartiles([of_variant / base for of_variant, base in zip(seconds, standard, strict=True)])
        rows.append(
            {
                "name": f"{form}, {str(dtype).removeprefix('torch.')}, {'batched' if batched else 'one by one'}",
                "shape": f"{short}x{long}",
                **summary(seconds),
                "of_standard": middle,
                "of_standard_low": low,
                "of_standard_high": high,
                "flops": FORMS[form][1](short, long, schedule.ns_steps) / standard_flops(short, long, schedule.ns_steps),
                "error": f"{errors[form, dtype, batched]:.1e}",
            }
        )
    return rows


def _one_by_one(form: Callable[[Tensor, Schedule], Tensor], stack: Tensor, schedule: Schedule) -> list[Tensor]:
    return [form(matrix, schedule) for matrix in stack]


def _seconds(call: Callable[[], object], device: str) -> float:
    """Seconds of one call.

    On a CPU this is process time, which other processes disturb less than wall time.
    """
    clock = time.perf_counter if device == "cuda" else time.process_time
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def _shapes(text: str) -> list[tuple[int, int]]:
    """``256x512,512x512``: short sides first."""
    return [(int(short), int(long)) for short, long in (shape.split("x") for shape in text.split(","))]


def _forms(text: str) -> list[str]:
    """Form names with commas between them; the standard form comes first, as the reference."""
    names = text.split(",")
    if unknown := set(names) - FORMS.keys():
        raise argparse.ArgumentTypeError(f"found {sorted(unknown)}, expected some of {list(FORMS)}")
    return [form for form in FORMS if form == "standard" or form in names]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=_shapes, default=_shapes("256x256,256x320,256x384,256x512,256x768,256x1024,256x2048"))
    parser.add_argument("--forms", type=_forms, default=list(FORMS), help="forms to compare with the standard form (all)")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="quintic")
    parser.add_argument("--batch", type=int, default=4, help="matrices of one shape")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    options = (arguments.forms, SCHEDULES[arguments.schedule], arguments.batch, arguments.device, arguments.rounds)
    show([row for shape in arguments.shapes for row in measure(*shape, *options)], arguments.json)


if __name__ == "__main__":
    main()
