"""Programs that nobody wrote: on ranks they give the bits, and the errors, of one process."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from program import OPERATIONS, Operation, draw_program
from search import search
from team import Team

NUM_PROGRAMS = 40


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_programs_do_the_same_on_ranks_as_in_one_process(world_size: int) -> None:
    seeds = range(NUM_PROGRAMS * world_size, NUM_PROGRAMS * (world_size + 1))
    failures, counts = search(seeds, [world_size], most_failures=1)
    assert not failures, failures[0]
    assert counts["programs"] == NUM_PROGRAMS
    assert counts["refused layouts"] < NUM_PROGRAMS // 4


@pytest.mark.distributed
def test_a_foreign_error_and_a_rank_that_goes_its_own_way_are_reported() -> None:
    program = draw_program(3, ("backward", "step"))
    with Team(2, seconds=30) as team:
        assert team.run(program)[0] is None
        trouble, _ = team.run(dataclasses.replace(program, operations=(Operation("no_such_operation", {}),)))
        assert trouble is not None
        assert "foreign error: AttributeError" in trouble
        apart = Operation("write_on_one_rank", {"rank": 1})
        trouble, _ = team.run(dataclasses.replace(program, operations=(*program.operations[:2], apart, *program.operations[2:])))
        assert trouble is not None
        assert "differs by" in trouble


def test_a_seed_is_a_program_and_programs_reach_every_operation() -> None:
    programs = [draw_program(seed) for seed in range(300)]
    assert programs == [draw_program(seed) for seed in range(300)]
    assert {operation.name for program in programs for operation in program.operations} == set(OPERATIONS)
    assert any(program.is_published for program in programs)
    assert any(program.layout is None for program in programs)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, with its AddressSanitizer")
@pytest.mark.parametrize("plants", [False, True], ids=["kernels", "planted"])
def test_kernels_stay_within_their_tensors(plants: bool) -> None:
    script = Path(__file__).with_name("sanitizer.py")
    command = [sys.executable, str(script), "--programs", "4", "--ranks", "2", "--most-failures", "1", *(["--plant"] * plants)]
    found = subprocess.run(command, capture_output=True, text=True)
    if "cannot run on this machine" in found.stdout:
        pytest.skip(found.stdout)
    assert (found.returncode != 0) == plants, found.stdout + found.stderr
    assert ("heap-buffer-overflow" in found.stdout) == plants, found.stdout
