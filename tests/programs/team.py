"""Ranks that are started once and then run one program after the other."""

import pickle
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from comparison import Report, run_program
from program import Program
from ranks import _context, _rank_main


class Team:
    """``world_size`` gloo ranks. They are started anew when one of them did not answer.

    Args:
        world_size: number of ranks.
        seconds: after which a program counts as hanging.
    """

    def __init__(self, world_size: int, seconds: float = 60) -> None:
        self._world_size, self._seconds = world_size, seconds
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def run(self, program: Program) -> tuple[str | None, Report | None]:
        """The trouble of a program, and the report of the first rank where there is none."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(program)
        trouble, report = self._collect()
        if report is None:
            self.stop()
        return trouble, report

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        for rank in range(self._world_size):
            here, there = _context.Pipe()
            arguments = (rank, self._world_size, store, there, _serve, (there, self._world_size))
            process = _context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def _collect(self) -> tuple[str | None, Report | None]:
        reports: dict[int, Report] = {}
        deadline, trouble = time.monotonic() + self._seconds, None
        while len(reports) < self._world_size:
            missing = [rank for rank in range(self._world_size) if rank not in reports]
            ready = wait([self._pipes[rank] for rank in missing], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                waiting = f"ranks {missing} did not answer"
                return f"{trouble}; then {waiting}" if trouble else f"hang: {waiting} within {self._seconds} s", None
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    reports[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    self._processes[rank].join(timeout=5)
                    return trouble or f"rank {rank} died with exit code {self._processes[rank].exitcode}", None
                if reports[rank].troubles and trouble is None:
                    trouble = f"rank {rank}: {reports[rank].troubles[0]}"
                    # The others may wait for this rank for ever.
                    deadline = min(deadline, time.monotonic() + 5)
        if trouble is None and len({report[1:] for report in reports.values()}) > 1:
            trouble = f"ranks ended differently: {[report[1:] for report in reports.values()]}"
        return trouble, reports[0]


def _serve(pipe: Connection, world_size: int) -> None:
    """Run the programs that arrive until the other end is closed."""
    while True:
        try:
            program = pipe.recv()
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(run_program(program, world_size)))
