"""Real gloo ranks for tests: each a process of its own, started from a server that has torch imported already."""

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.fsdp", "omn_dist"])


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 90) -> list[Any]:
    """``function(*arguments)`` on every rank of a gloo group; what each rank returns, by rank.

    Raises ``AssertionError`` with the traceback of the first rank that failed, and when ``seconds`` have passed. Either
    way every rank is ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks, pipes = [], []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main, args=(rank, world_size, Path(folder) / "store", sender, function, arguments), daemon=True
            )
            process.start()
            sender.close()
            ranks.append(process)
            pipes.append(receiver)
        try:
            return _collect(pipes, seconds)
        finally:
            for process in ranks:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + seconds
    while len(results) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise AssertionError(f"ranks {missing} of {len(pipes)} did not answer within {seconds} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                failed, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise AssertionError(f"rank {rank} of {len(pipes)} ended without an answer") from None
            if failed:
                raise AssertionError(f"rank {rank} of {len(pipes)} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _plain(failed: bool, value: Any) -> bytes:
    """As bytes: the pickler of a pipe would share tensors through files that are gone when their rank has ended."""
    return pickle.dumps((failed, value))


def _rank_main(
    rank: int, world_size: int, store: Path, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        value = function(*arguments)
        pipe.send_bytes(_plain(False, value))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(_plain(True, traceback.format_exc()))
        sys.stdout.flush()
        os._exit(1)
