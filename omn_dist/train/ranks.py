"""The ranks of a run.

Which rank this process is, its process group, agreement on errors, and requests to stop.
"""

import dataclasses
import datetime
import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in its stubs

from omn_dist.settings import SettingsError

T = TypeVar("T")


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
            machine, or some of the variables are missing.
    """
    present = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ]
    if present and len(present) < 3:
        raise SettingsError(
            f"environment: found {', '.join(present)} only, expected RANK, LOCAL_RANK and WORLD_SIZE; start with torchrun"
        )
    rank, local_rank, world_size = (
        (int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])) if present else (0, 0, 1)
    )
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return Ranks(rank=rank, local_rank=local_rank, world_size=world_size, device=torch.device("cpu"))
    check_num_gpus(local_rank + 1)
    return Ranks(rank=rank, local_rank=local_rank, world_size=world_size, device=torch.device("cuda", local_rank))


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

    Collective: all ranks must call.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    backend = "gloo"
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
        backend = "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)


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
