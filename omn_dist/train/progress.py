"""Progress of a run: a progress bar on a terminal, log lines elsewhere."""

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

logger = logging.getLogger("omn_dist.train")


class Progress:
    """Shows the progress on the first rank; does nothing on the others.

    Args:
        first_step: step at which this process starts.
        last_step: step at which it ends.
        print_every_steps: steps between log lines where there is no terminal.
        enabled: whether this rank shows anything.
    """

    def __init__(self, first_step: int, last_step: int, *, print_every_steps: int, enabled: bool) -> None:
        self._enabled = enabled
        self._first_step, self._last_step = first_step, last_step
        self._every = print_every_steps
        self._started = time.monotonic()
        show_bar = enabled and sys.stderr.isatty()
        self._bar = tqdm(total=last_step, initial=first_step, unit="step", dynamic_ncols=True, leave=True) if show_bar else None

    def step(self, row: Mapping[str, Any]) -> None:
        """Show the row of a finished step."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {row['loss']:.4f}, {row['tokens_per_second']:,.0f} tokens/s", refresh=False)
            self._bar.update(1)
            return
        step = row["step"]
        if step % self._every and step != self._last_step:
            return
        rates = " ".join(f"{label} {rate:.2e}" for label, rate in row["learning_rates"].items())
        elapsed = time.monotonic() - self._started
        left = elapsed / (step - self._first_step) * (self._last_step - step)
        logger.info(
            "step %d/%d  tokens %s  loss %.4f  lr %s  %s tokens/s  %d:%02d left",
            step,
            self._last_step,
            f"{row['tokens']:,}",
            row["loss"],
            rates,
            f"{row['tokens_per_second']:,.0f}",
            *divmod(round(left), 60),
        )

    def close(self) -> None:
        """Stop drawing; the bar stays on the screen."""
        if self._bar is not None:
            self._bar.close()
