"""Runs random programs on ranks and prints those that fail, as short as they still fail.

python tests/programs/search.py --programs 2000 --ranks 1 2 3
"""

import argparse
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from program import OPERATIONS, Program, draw_program
from team import Team


def shrunk(team: Team, program: Program, trouble: str, most_runs: int = 60) -> tuple[Program, str]:
    """The program without the operations and blocks that its failure does not need."""
    # What the ranks are left with after a failure is unknown.
    team.stop()
    num_runs = 0
    index = len(program.operations) - 1
    while index >= 0 and num_runs < most_runs:
        shorter = dataclasses.replace(program, operations=program.operations[:index] + program.operations[index + 1 :])
        found, _ = team.run(shorter)
        num_runs += 1
        if found is not None and _kind(found) == _kind(trouble):
            program, trouble = shorter, found
        index = min(index - 1, len(program.operations) - 1)
    for number in reversed(range(len(program.blocks))):
        if len(program.blocks) == 1:
            break
        fewer = dataclasses.replace(program, blocks=program.blocks[:number] + program.blocks[number + 1 :])
        found, _ = team.run(fewer)
        if found is not None and _kind(found) == _kind(trouble):
            program, trouble = fewer, found
    return program, trouble


def _kind(trouble: str) -> str:
    """What two troubles share that are the same fault, roughly: hangs, deaths, foreign errors, differences."""
    if "foreign error" in trouble:
        return trouble.partition("foreign error:")[2].splitlines()[0][:40]
    return next((word for word in ("hang", "died", "differs", "only", "one process had", "in one process") if word in trouble), "")


def search(
    seeds: Sequence[int],
    world_sizes: Sequence[int],
    operations: Sequence[str] = OPERATIONS,
    *,
    seconds: float = 60,
    shrinks: bool = True,
    most_failures: int = 10,
) -> tuple[list[str], Counter[str]]:
    """The failures as texts, and what was compared."""
    failures: list[str] = []
    counts: Counter[str] = Counter()
    for world_size in world_sizes:
        num_failures, start = 0, time.monotonic()
        with Team(world_size, seconds) as team:
            for seed in seeds:
                program = draw_program(seed, operations)
                trouble, report = team.run(program)
                if trouble is not None:
                    if shrinks:
                        program, trouble = shrunk(team, program, trouble)
                    team.stop()
                    text = f"W={world_size}: {trouble}\n{program}\n"
                    print(text, flush=True)
                    failures.append(text)
                    num_failures += 1
                    if num_failures == most_failures:
                        print(f"W={world_size}: stopped after {num_failures} failures", flush=True)
                        break
                elif report is not None:
                    counts["programs"] += 1
                    counts["operations"] += report.num_operations
                    counts["same errors"] += report.num_errors
                    counts["refused layouts"] += report.num_operations < len(program.operations)
        print(f"W={world_size}: {num_failures} failures in {time.monotonic() - start:.0f} s", flush=True)
    return failures, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100, help="how many for each number of ranks")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS, metavar="NAME")
    parser.add_argument("--without", nargs="+", default=[], choices=OPERATIONS, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=60, help="after which a program counts as hanging")
    parser.add_argument("--most-failures", type=int, default=10, help="for each number of ranks")
    parser.add_argument("--no-shrinking", action="store_true")
    options = parser.parse_args()
    start = time.monotonic()
    failures, counts = search(
        range(options.first, options.first + options.programs),
        options.ranks,
        [name for name in options.operations if name not in options.without],
        seconds=options.seconds,
        shrinks=not options.no_shrinking,
        most_failures=options.most_failures,
    )
    print(f"{len(failures)} failures; without failure: {dict(counts)}; {time.monotonic() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
