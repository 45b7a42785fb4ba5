"""The ranks of a run.

Which rank this process is, its process group, agreement on errors, and requests to stop.
"""

import dataclasses
import datetime
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistError, HashStore, PrefixStore, Store  # type: ignore[attr-defined]  # not in its stubs

from omn_dist.settings import SettingsError
from omn_dist.train.meeting_point import (
    MeetingPointError,
    MissingMembersError,
    check_address,
    check_route,
    is_loopback,
    open_store,
    parse_port,
    resolve,
)

T = TypeVar("T")

_POLL_SECONDS = 0.1
_READING_SECONDS = 1.0
_MISSING = "missing"
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# Numbers of tasks from launchers that do not set the names above.
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
    """The rank of this process among the processes of the run."""

    rank: int
    """0 .. ``world_size`` - 1."""
    local_rank: int
    """Number on this machine, and index of the GPU."""
    world_size: int
    """Processes of the run."""
    device: torch.device
    """Where this rank computes."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files and the log."""
        return self.rank == 0


def read_ranks(device: Literal["auto", "cpu", "cuda"]) -> Ranks:
    """The rank of this process, from torchrun's variables; without them, rank 0 of 1.

    Raises:
        SettingsError: CUDA is asked for and missing, there are fewer GPUs than processes on this
            machine, or the variables are incomplete or contradict each other.
    """
    rank, local_rank, world_size = rank_numbers(os.environ)
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return Ranks(rank=rank, local_rank=local_rank, world_size=world_size, device=torch.device("cpu"))
    check_num_gpus(local_rank + 1)
    return Ranks(rank=rank, local_rank=local_rank, world_size=world_size, device=torch.device("cuda", local_rank))


def rank_numbers(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, number on this machine, and number of ranks, from torchrun's variables.

    Raises:
        MeetingPointError: some are missing, are no numbers, or contradict each other. Nothing is
            guessed: a process that takes itself for the only one would train its own model.
    """
    present = [name for name in _NAMES if name in environment]
    if not present:
        for name in _NUM_TASKS:
            if environment.get(name, "1") != "1":
                raise MeetingPointError(
                    f"RANK: not set, but {name} is {environment[name]}, expected one process or RANK, LOCAL_RANK and WORLD_SIZE in "
                    "each; start with torchrun, or with omn-dist launch --launcher srun"
                )
        return 0, 0, 1
    if len(present) < len(_NAMES):
        raise MeetingPointError(
            f"environment: found {', '.join(present)} only, expected RANK, LOCAL_RANK and WORLD_SIZE; start with torchrun"
        )
    rank, local_rank, world_size = (_number(environment, name) for name in _NAMES)
    on_machine = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else world_size
    for name, found, limit_name, limit in (
        ("RANK", rank, "WORLD_SIZE", world_size),
        ("LOCAL_RANK", local_rank, "WORLD_SIZE", world_size),
        ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", on_machine),
        ("LOCAL_WORLD_SIZE", on_machine - 1, "WORLD_SIZE", world_size),
    ):
        if not 0 <= found < limit:
            raise MeetingPointError(
                f"{name}: found {environment[name]} with {limit_name}={limit}, which contradict each other, expected "
                f"{'at most' if name == 'LOCAL_WORLD_SIZE' else 'less than'} {limit_name}; start with torchrun"
            )
    return rank, local_rank, world_size


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not re.fullmatch(r"[0-9]+", text):
        raise MeetingPointError(f"{name}: found {text!r}, expected a whole number; start with torchrun")
    return int(text)


def check_num_gpus(expected: int) -> None:
    """Check that this machine has at least ``expected`` GPUs.

    Raises:
        SettingsError: it has fewer.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < expected:
        raise SettingsError(
            f"device: found {found} GPUs on this machine, expected at least {expected}, one a process; start fewer "
            "processes or use device=cpu"
        )


def start_process_group(ranks: Ranks, timeout_seconds: float) -> None:
    """Start the default process group: gloo for CPU tensors, and NCCL for CUDA tensors.

    Collective: all ranks must call. Waits for them at MASTER_ADDR and MASTER_PORT, if a launcher
    has set the rank.

    Raises:
        MeetingPointError: the ranks cannot meet there, or their numbers contradict each other.
        MissingMembersError: some ranks did not come within ``timeout_seconds``.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    backend = "gloo"
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
        backend = "cpu:gloo,cuda:nccl"
    store = _meet(ranks, os.environ, timeout) if "RANK" in os.environ else HashStore()
    dist.init_process_group(backend, timeout=timeout, store=store, rank=ranks.rank, world_size=ranks.world_size)


def meeting_point(ranks: Ranks, environment: Mapping[str, str]) -> tuple[str, int, bool]:
    """Address and port at which the ranks meet, and whether this rank serves the store there.

    Raises:
        MeetingPointError: they are missing, or this rank could not meet the others there.
    """
    address = environment.get("MASTER_ADDR", "").strip()
    if not address:
        raise MeetingPointError(
            "MASTER_ADDR: not set or empty, expected the name or address of rank 0's machine; start with torchrun"
        )
    port = parse_port(environment.get("MASTER_PORT", "").strip())
    # torchrun's agent serves the store itself, on a machine that need not be rank 0's.
    serve = ranks.is_first and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    addresses = resolve(address)
    num_machines = -(-ranks.world_size // int(environment.get("LOCAL_WORLD_SIZE", ranks.world_size)))
    if ranks.rank == ranks.local_rank and not _is_loopback_everywhere(address):
        # The name of the first machine may be a loopback address on that machine itself.
        num_machines = 1
    problems = check_address(address, addresses, num_machines)
    if not problems and (serve or not ranks.is_first):
        problems = check_route(address, addresses, port, is_first=serve)
    if problems:
        raise MeetingPointError(f"rank {ranks.rank} on {socket.gethostname()}: {problems[0]}")
    return address, port, serve


def _is_loopback_everywhere(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:  # a name
        return host.lower().partition(".")[0] == "localhost"


def _meet(ranks: Ranks, environment: Mapping[str, str], timeout: datetime.timedelta) -> Store:
    """The store of the process group, when all ranks have come to it."""
    address, port, serve = meeting_point(ranks, environment)
    seconds = timeout.total_seconds()
    deadline = time.monotonic() + seconds
    try:
        opened = open_store(address, port, serve=serve, deadline=deadline, timeout=timeout)
        # Where torchrun starts ranks again, its agent's store has the keys of the last attempt.
        store = PrefixStore(f"omn_dist/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", opened)
        _wait_for_all(ranks, store, deadline)
    except (MissingMembersError, DistError) as error:
        reason = (str(error).splitlines() or ["no message"])[0]
        raise MissingMembersError(
            f"ranks at {address}:{port}: rank {ranks.rank} of {ranks.world_size} on {socket.gethostname()} did not meet the others "
            f"within {seconds:g} s ({reason}), expected all; check that every rank was started, with the same MASTER_ADDR and "
            "MASTER_PORT, and that no firewall blocks the port"
        ) from None
    return store


def _wait_for_all(ranks: Ranks, store: Store, deadline: float) -> None:
    world_size = str(ranks.world_size)
    first = store.compare_set("world_size", "", world_size).decode()
    if first != world_size:
        store.set(
            "problem", f"WORLD_SIZE: found {world_size} on rank {ranks.rank}, {first} on another rank, expected the same on all"
        )
    elif store.add(f"rank/{ranks.rank}", 1) > 1:
        store.set("problem", f"RANK: found {ranks.rank} more than once, expected it in one process; number the processes from 0")
    else:
        store.add("num_ranks", 1)
    while not store.check(["problem"]):
        if store.add("num_ranks", 0) == ranks.world_size:
            return
        if time.monotonic() > deadline:
            missing = [str(rank) for rank in range(ranks.world_size) if not store.check([f"rank/{rank}"])]
            store.set("problem", f"{_MISSING} {', '.join(missing[:8])}{' ...' if missing[8:] else ''}")
        time.sleep(_POLL_SECONDS)
    problem = store.get("problem").decode()
    if ranks.is_first:
        # The store may end with this process, and the others read the problem there.
        time.sleep(_READING_SECONDS)
    raise MissingMembersError(problem) if problem.startswith(_MISSING) else MeetingPointError(problem)


def stop_process_group() -> None:
    """Wait for all ranks, then end the process group. Collective: all ranks must call.

    Without the wait, a rank that ends early can make collectives of the others fail.
    """
    dist.barrier()
    dist.destroy_process_group()


def agree(check: Callable[[], T]) -> T:
    """Run ``check`` on every rank; if it fails on any rank, raise the same error on all ranks.

    Collective: all ranks must call. ``check`` must not be collective itself.

    Returns:
        The result of ``check`` on this rank.

    Raises:
        SettingsError: ``check`` raised :class:`SettingsError` or ``OSError`` on some rank. The
            message is that of the lowest such rank. Other exceptions are not caught.
    """
    result: list[T] = []
    message: str | None = None
    try:
        result.append(check())
    except (SettingsError, OSError) as error:
        message = str(error)
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    for rank, found in enumerate(messages):
        if found is not None:
            raise SettingsError(found if rank == 0 else f"rank {rank}: {found}")
    return result[0]


class StopRequest:
    """Records that a stop signal came; the training loop reads :attr:`requested` once a window.

    Args:
        names: names of the stop signals, such as ``SIGTERM``.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.requested = False
        self._signals = tuple(signal.Signals[name] for name in names)
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        """Install the handler of the stop signals."""
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
