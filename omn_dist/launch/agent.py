"""torchrun's agent for the ranks of one machine, with exit statuses and stop signals for jobs.

The command ``torchrun`` exits with status 1 for every failure, and kills the ranks 30 seconds after
a stop signal, which is too short for a large checkpoint. Here stop signals go to the ranks, the
agent waits until the ranks end, and its exit status comes from theirs.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Literal

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from typing_extensions import override

from omn_dist.launch.job_layout import JobLayout

logger = logging.getLogger("omn_dist.launch")

Rendezvous = Literal["static", "c10d"]
"""How machines are numbered. ``static``: as the layout says; ``c10d``: in the order in which they
join."""

STOPPED, WRONG_INPUT, FAILED = 75, 2, 1
"""Exit statuses other than 0."""

RELAYED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a launcher sends on to its ranks."""
_POLL_SECONDS = 0.5


def combined_status(statuses: Sequence[int], *, asked_to_stop: bool) -> int:
    """One exit status for many processes.

    A rank exits with 75 after all ranks have saved. So a single 75 decides, whatever the others
    exit with afterwards. If a stop signal ends ranks before they can handle it, the status is 75
    too: nothing is lost, because the newest checkpoint is still there.

    Args:
        statuses: exit statuses; the negative number of a signal where one ended the process.
        asked_to_stop: whether a stop signal came.
    """
    if STOPPED in statuses:
        return STOPPED
    failures = [status for status in statuses if status]
    if not failures:
        return 0
    if WRONG_INPUT in failures:
        return WRONG_INPUT
    if asked_to_stop and any(-status in RELAYED_SIGNALS for status in failures):
        return STOPPED
    return FAILED


class SignalRelay:
    """Sends stop signals on to the child processes of this one, including later children.

    Each child gets each signal once.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        """Signals that came, in their order."""
        self._sent: set[tuple[int, int]] = set()
        self._previous: dict[signal.Signals, object] = {}
        self._done = threading.Event()

    def __enter__(self) -> "SignalRelay":
        """Install the handlers."""
        for number in RELAYED_SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        self._done.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        self._relay()

    def _watch(self) -> None:
        # For children that start after the signal came.
        while not self._done.wait(_POLL_SECONDS):
            self._relay()

    def _relay(self) -> None:
        for number in tuple(self.received):
            for child in child_processes():
                if (child, number) not in self._sent:
                    self._sent.add((child, number))
                    try:
                        os.kill(child, number)
                    except ProcessLookupError:
                        continue


def child_processes() -> list[int]:
    """Process numbers of this process's children."""
    return [int(child) for path in Path("/proc/self/task").glob("*/children") for child in _text_of(path).split()]


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # that thread has ended
        return ""


class _RankLogs(LogsSpecs):
    """Writes ``rank_N.out`` and ``rank_N.err`` of every rank N into a folder.

    The output of rank 0 also goes to the screen.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), redirects=Std.ALL, tee=Std.NONE)
        self._folder = folder

    @property
    @override
    def root_log_dir(self) -> str:
        return str(self._folder)

    @override
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._folder.mkdir(parents=True, exist_ok=True)
        destination = LogsDest()
        for local_rank, environment in envs.items():
            stem = self._folder / f"rank_{environment['RANK']}"
            destination.stdouts[local_rank], destination.stderrs[local_rank] = f"{stem}.out", f"{stem}.err"
            # The agent reads here which rank failed first, and why.
            error_file = f"{stem}.error.json"
            Path(error_file).unlink(missing_ok=True)
            destination.error_files[local_rank] = environment["TORCHELASTIC_ERROR_FILE"] = error_file
            if environment["RANK"] == "0":
                destination.tee_stdouts[local_rank] = f"{stem}.out"
                destination.tee_stderrs[local_rank] = f"{stem}.err"
        return destination


def run_agent(
    command: Sequence[str],
    layout: JobLayout,
    *,
    run_id: str,
    rendezvous: Rendezvous = "static",
    own_address: str = "127.0.0.1",
    log_folder: Path | None = None,
    relay: SignalRelay,
) -> int:
    """Run a command on every rank of this machine, and wait for the end.

    Args:
        command: arguments for this Python, such as ``-m omn_dist train CONFIG``.
        layout: machines and ranks; its port is that of torchrun's rendezvous.
        run_id: name of the run, the same on all machines.
        rendezvous: how several machines find each other.
        own_address: address at which the other machines reach this one.
        log_folder: folder for the output of each rank; ``None``: all ranks write to this process's
            own output.
        relay: receives the stop signals.

    Returns:
        The exit status: 0, 1, 2 or 75.
    """
    _quiet_agent()
    logs: LogsSpecs = DefaultLogsSpecs() if log_folder is None else _RankLogs(log_folder)
    alone = layout.num_nodes == 1
    backend = "c10d" if alone else rendezvous
    options: dict[str, object] = {"is_host": layout.node_rank == 0} if backend == "c10d" else {"rank": layout.node_rank}
    config = LaunchConfig(
        min_nodes=layout.num_nodes,
        max_nodes=layout.num_nodes,
        nproc_per_node=layout.ranks_per_node,
        run_id=run_id,
        role="rank",
        rdzv_backend=backend,
        rdzv_endpoint="127.0.0.1:0" if alone else f"{layout.address}:{layout.port}",
        rdzv_configs=options,
        local_addr="127.0.0.1" if alone else own_address,
        logs_specs=logs,
        max_restarts=0,
        # The agent ends at the signals that it handles; these two are not sent on to the ranks.
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        status = combined_status([failure.exitcode for failure in error.failures.values()], asked_to_stop=bool(relay.received))
        if status == FAILED:
            print(error, file=sys.stderr)
        return status
    except Exception as error:  # the rendezvous raises errors of many types
        reason = (str(error).splitlines() or ["no message"])[0]
        logger.error("machine %d of %d: %s: %s", layout.node_rank, layout.num_nodes, type(error).__name__, reason)
        return FAILED
    return 0


def _quiet_agent() -> None:
    """Switch off the log of torchrun's agent, unless LOGLEVEL is set.

    It repeats the output of the ranks and the report of this module.
    """
    if "LOGLEVEL" in os.environ:
        return
    for name in tuple(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def thread_limits(environment: Mapping[str, str], ranks_per_node: int) -> dict[str, str]:
    """``OMP_NUM_THREADS`` that divides the cores of this process among the ranks.

    Empty where the variable is set already.
    """
    if "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks_per_node))}
