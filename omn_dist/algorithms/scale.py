"""The shape factor of a matrix update. No other place computes it."""

import math
from typing import Literal, get_args

from omn_dist.settings import unknown_name

ScaleMode = Literal["sqrt(max(1, m/n))", "0.2*sqrt(max(m, n))", "sqrt(m/n)", "sqrt(max(m, n))", "1"]
SCALE_MODES: tuple[str, ...] = get_args(ScaleMode)


def adjusted_lr(lr: float, mode: ScaleMode, num_rows: int, num_columns: int) -> float:
    """The learning rate times the shape factor of a matrix.

    Args:
        lr: learning rate.
        mode: named by its formula, since "spectral" and the like differ between projects.
            ``sqrt(max(1, m/n))`` is that of Muon, torch's "original" and OMN;
            ``0.2*sqrt(max(m, n))`` that of Moonlight and torch's "match_rms_adamw".
        num_rows: outputs m of the whole matrix, never of a shard or a fused tensor.
        num_columns: inputs n of the same.

    Raises:
        ValueError: an unknown mode.
    """
    if mode == "sqrt(max(1, m/n))":
        return lr * math.sqrt(max(1, num_rows / num_columns))
    if mode == "0.2*sqrt(max(m, n))":
        # The order of the product is torch.optim.Muon's: another one differs in the last bit.
        return lr * (0.2 * math.sqrt(max(num_rows, num_columns)))
    if mode == "sqrt(m/n)":
        return lr * math.sqrt(num_rows / num_columns)
    if mode == "sqrt(max(m, n))":
        return lr * math.sqrt(max(num_rows, num_columns))
    if mode == "1":
        return lr
    raise ValueError(unknown_name("scale", mode, SCALE_MODES))
