"""The token clock, and the learning rate over accepted tokens.

A window has the learning rate that the schedule has *at its end*: with t accepted tokens before it
and n tokens in it, ``learning_rate(schedule, peak, t + n)``. So the rate of the first window is not
zero, the window that ends the warm-up has the peak, and the window that reaches ``total_tokens``
has the floor.
"""

import dataclasses
import math

from omn_dist.settings import SettingsError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Warm-up, stable phase, and square-root cool-down, over accepted tokens."""

    total_tokens: int
    """Accepted tokens at which the run ends and the cool-down reaches the floor."""
    warmup_tokens: int = 0
    """Accepted tokens over which the rate rises linearly from zero to the peak."""
    stable_until_tokens: int | None = None
    """Accepted tokens at which the cool-down starts; null: no cool-down."""
    floor: float = 1e-5
    """Learning rate at the end of the cool-down, for every group. A lower peak stays as it is."""

    def __post_init__(self) -> None:
        if self.total_tokens < 1:
            raise SettingsError(f"schedule.total_tokens: found {self.total_tokens}, expected at least 1")
        if not 0 <= self.warmup_tokens <= self.cooldown_start:
            raise SettingsError(
                f"schedule.warmup_tokens: found {self.warmup_tokens}, expected 0 to the start of the cool-down "
                f"({self.cooldown_start}); warm-up ends before the cool-down starts"
            )
        if self.cooldown_start > self.total_tokens:
            raise SettingsError(
                f"schedule.stable_until_tokens: found {self.stable_until_tokens}, expected at most total_tokens "
                f"({self.total_tokens}); lower it, or use null for no cool-down"
            )
        if not (math.isfinite(self.floor) and self.floor >= 0):
            raise SettingsError(f"schedule.floor: found {self.floor}, expected a number of at least 0")

    @property
    def cooldown_start(self) -> int:
        """Accepted tokens at which the cool-down starts; ``total_tokens`` without a cool-down."""
        return self.total_tokens if self.stable_until_tokens is None else self.stable_until_tokens


def learning_rate(schedule: ScheduleConfig, peak: float, tokens: int) -> float:
    """The learning rate at ``tokens`` accepted tokens, for a group whose stable rate is ``peak``.

    Warm-up: ``peak * tokens / warmup_tokens``. Stable: ``peak``. Cool-down:
    ``floor + (peak - floor) * (1 - sqrt(p))``, where p rises from 0 at its start to 1 at
    ``total_tokens``; afterwards the floor.
    """
    if tokens < schedule.warmup_tokens:
        return peak * tokens / schedule.warmup_tokens
    if schedule.stable_until_tokens is None or tokens <= schedule.stable_until_tokens:
        return peak
    # A peak below the floor stays as it is; a rate of zero must stay zero.
    floor = min(schedule.floor, peak)
    length = schedule.total_tokens - schedule.stable_until_tokens
    progress = 1.0 if length == 0 else min(1.0, (tokens - schedule.stable_until_tokens) / length)
    return floor + (peak - floor) * (1.0 - math.sqrt(progress))


@dataclasses.dataclass(kw_only=True)
class TokenClock:
    """Counts of a run.

    Accepted windows count as tokens and steps; every window counts for the position in the data.
    """

    accepted_tokens: int = 0
    """Tokens of all accepted windows; the argument of the schedule."""
    steps: int = 0
    """Accepted windows, which are the optimizer steps taken."""
    windows: int = 0
    """Windows read from the data, accepted or rejected. The position in the data is this number
    times the global batch."""
    rejected: int = 0
    """Rejected windows."""
    consecutive_rejected: int = 0
    """Rejected windows since the last accepted one."""

    def accept(self, tokens: int) -> None:
        """Count an accepted window of ``tokens`` tokens."""
        self.accepted_tokens += tokens
        self.steps += 1
        self.windows += 1
        self.consecutive_rejected = 0

    def reject(self) -> None:
        """Count a rejected window: its data are not read again, tokens and steps do not change."""
        self.windows += 1
        self.rejected += 1
        self.consecutive_rejected += 1
