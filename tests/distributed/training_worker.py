"""A rank of a training run for test_training.py: the command line, with the fault in FAULT.

    nan:K      in window K the gradient of one parameter is not a number, on the last rank only
    skip:K     window K is not read, as if the data did not have it
    pause:S    saving step S stops before the checkpoint is complete, until the process is ended
    raise:K    in window K the last rank raises an exception

Each rank writes its exit status to STATUS_FOLDER, since torchrun does not report it.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omn_dist.cli import main
from omn_dist.train import checkpointing, loop
from omn_dist.train.norms import local_part

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STATUS_FOLDER = Path(os.environ["STATUS_FOLDER"])


def _install(fault: str, number: int) -> None:
    accumulate, write = loop.accumulate_window, checkpointing.write_durably

    def faulty_accumulate(model: Any, optimizer: Any, source: Any, config: Any, ranks: Any, window: int) -> Tensor:
        if fault == "skip" and window >= number:
            window += 1
        loss = accumulate(model, optimizer, source, config, ranks, window)
        if window == number and RANK == WORLD_SIZE - 1:
            if fault == "raise":
                raise RuntimeError("this rank fails on purpose")
            if fault == "nan":
                local_part(model.layers[1].feed_forward.up_proj.weight.grad)[0, 0] = torch.nan
        return loss

    def pausing_write(path: Path, text: str) -> None:
        if path.name == "manifest.json" and path.parent.name == f"step_{number:08d}.partial":
            (STATUS_FOLDER / "paused").touch()
            time.sleep(600)
        write(path, text)

    loop.accumulate_window = faulty_accumulate
    if fault == "pause":
        checkpointing.write_durably = pausing_write


if __name__ == "__main__":
    (STATUS_FOLDER / f"process_{RANK}").write_text(str(os.getpid()))
    if "FAULT" in os.environ:
        name, _, text = os.environ["FAULT"].partition(":")
        _install(name, int(text))
    status = main()
    (STATUS_FOLDER / f"status_{RANK}").write_text(str(status))
    sys.exit(status)
