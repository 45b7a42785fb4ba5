"""The shape factor of a matrix update: the one place where the scale is computed."""

import math
from typing import Literal, get_args

from omn_dist.settings import unknown_name

ScaleMode = Literal["sqrt(max(1, m/n))", "0.2*sqrt(max(m, n))", "sqrt(m/n)", "sqrt(max(m, n))", "1"]
SCALE_MODES: tuple[str, ...] = get_args(ScaleMode)


def adjusted_lr(lr: float, mode: ScaleMode, num_rows: int, num_columns: int) -> float:
    """``lr`` times the shape factor of a matrix with m = ``num_rows`` outputs and n = ``num_columns`` inputs.

    Modes are named by their formulas, since "spectral" and the like mean different ones in different projects:
    ``sqrt(max(1, m/n))`` (Muon, torch "original", OMN), ``0.2*sqrt(max(m, n))`` (Moonlight, torch "match_rms_adamw"),
    ``sqrt(m/n)``, ``sqrt(max(m, n))``, ``1``. The shape is that of the whole matrix, never of a shard or a fused tensor.
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
