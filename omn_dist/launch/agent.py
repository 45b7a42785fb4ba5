"""torchrun's agent for the ranks of one machine, with exit statuses and stop signals that a job can rely on.

The command ``torchrun`` answers every failure with status 1, and a stop signal with a kill after 30 seconds, which is
too short for a large checkpoint. Here signals are handed to the ranks, which have all the time that the scheduler
gives, and the ranks' own exit statuses come out.
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

from omn_dist.launch.layout import Layout

logger = logging.getLogger("omn_dist.launch")

Rendezvous = Literal["static", "c10d"]
"""``static``: machine i has ranks i * n ... ``c10d``: machines get their places as they come."""

STOPPED, WRONG_INPUT, FAILED = 75, 2, 1
"""Exit statuses besides 0."""

RELAYED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.5


def combined_status(statuses: Sequence[int], *, asked_to_stop: bool) -> int:
    """One exit status for many processes.

    A rank says 75 when all ranks have saved, so one of them is enough, however the others ended afterwards. Ranks that
    a stop signal ended before they could take it have lost nothing either: the newest checkpoint is what it was.

    Args:
        statuses: exit statuses; the number of a signal, negative, where one ended a process.
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
    """Hands stop signals to the child processes of this one, each signal once to each child; also to later children."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        """Signals that came."""
        self._told: set[tuple[int, int]] = set()
        self._previous: dict[signal.Signals, object] = {}
        self._done = threading.Event()

    def __enter__(self) -> "SignalRelay":
        """Take over the signals."""
        for number in RELAYED_SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        self._done.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        self._tell()

    def _watch(self) -> None:
        # A signal may come while the ranks are being started.
        while not self._done.wait(_POLL_SECONDS):
            self._tell()

    def _tell(self) -> None:
        for number in tuple(self.received):
            for child in children():
                if (child, number) not in self._told:
                    self._told.add((child, number))
                    try:
                        os.kill(child, number)
                    except ProcessLookupError:
                        continue


def children() -> list[int]:
    """Process numbers of the children of this process."""
    return [int(child) for path in Path("/proc/self/task").glob("*/children") for child in _read(path).split()]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # that thread has ended
        return ""


class _RankLogs(LogsSpecs):
    """A folder with ``rank_N.out`` and ``rank_N.err`` of every rank; those of rank 0 are shown as well."""

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
            # The ranks' launcher reads from here which rank failed first, and why.
            error_file = f"{stem}.error.json"
            Path(error_file).unlink(missing_ok=True)
            destination.error_files[local_rank] = environment["TORCHELASTIC_ERROR_FILE"] = error_file
            if environment["RANK"] == "0":
                destination.tee_stdouts[local_rank] = f"{stem}.out"
                destination.tee_stderrs[local_rank] = f"{stem}.err"
        return destination


def run_agent(
    command: Sequence[str],
    layout: Layout,
    *,
    run_id: str,
    rendezvous: Rendezvous = "static",
    own_address: str = "127.0.0.1",
    log_folder: Path | None = None,
    relay: SignalRelay,
) -> int:
    """Run ``command``, arguments of this Python, on every rank of this machine; 0, 1, 2 or 75.

    Args:
        command: such as ``-m omn_dist train CONFIG``.
        layout: machines and ranks; its port is the rendezvous'.
        run_id: the same on all machines.
        rendezvous: how the machines find each other, when there are several.
        own_address: where the others reach this machine.
        log_folder: for one file a rank; ``None``: all ranks write where this process does.
        relay: gets the stop signals.
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
        # The agent raises where a signal comes that it handles; these two are the ones nobody relays.
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        status = combined_status([failure.exitcode for failure in error.failures.values()], asked_to_stop=bool(relay.received))
        if status == FAILED:
            print(error, file=sys.stderr)
        return status
    except Exception as error:  # the rendezvous fails in many ways
        reason = (str(error).splitlines() or ["no message"])[0]
        logger.error("machine %d of %d: %s: %s", layout.node_rank, layout.num_nodes, type(error).__name__, reason)
        return FAILED
    return 0


def _quiet_agent() -> None:
    """The agent's own messages repeat what the ranks say and what is reported here; LOGLEVEL brings them back."""
    if "LOGLEVEL" in os.environ:
        return
    for name in tuple(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def thread_limits(environment: Mapping[str, str], ranks_per_node: int) -> dict[str, str]:
    """The variable that divides this process's cores among the ranks, unless it is set."""
    if "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks_per_node))}
