import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omn_dist.settings import SettingsError
from omn_dist.train.schedule import ScheduleConfig, TokenClock, learning_rate

OMN_1 = ScheduleConfig(warmup_tokens=2_000_000_000, stable_until_tokens=164_000_000_000, total_tokens=193_000_000_000, floor=1e-5)


@pytest.mark.parametrize("peak", [0.01, 0.0003])
def test_omn_1_values(peak: float) -> None:
    billion = 1_000_000_000
    assert learning_rate(OMN_1, peak, 0) == 0.0
    assert learning_rate(OMN_1, peak, billion) == peak / 2
    assert learning_rate(OMN_1, peak, 2 * billion) == peak
    assert learning_rate(OMN_1, peak, 164 * billion) == peak
    quarter = 164 * billion + 29 * billion // 4
    assert learning_rate(OMN_1, peak, quarter) == pytest.approx(1e-5 + (peak - 1e-5) * 0.5, rel=1e-12)
    assert learning_rate(OMN_1, peak, 193 * billion) == pytest.approx(1e-5, rel=1e-12)
    assert learning_rate(OMN_1, peak, 500 * billion) == pytest.approx(1e-5, rel=1e-12)


@given(tokens=st.integers(0, 200), peak=st.floats(0, 1))
def test_between_zero_and_peak_and_falling_after_warm_up(tokens: int, peak: float) -> None:
    schedule = ScheduleConfig(warmup_tokens=20, stable_until_tokens=100, total_tokens=150, floor=1e-3)
    rate, following = learning_rate(schedule, peak, tokens), learning_rate(schedule, peak, tokens + 1)
    assert 0 <= rate <= peak
    assert following >= rate if tokens < 20 else following <= rate


def test_floor_never_raises_a_smaller_peak() -> None:
    schedule = ScheduleConfig(stable_until_tokens=10, total_tokens=20, floor=1e-5)
    for tokens in (0, 10, 15, 20, 30):
        assert learning_rate(schedule, 0.0, tokens) == 0.0
        assert learning_rate(schedule, 1e-6, tokens) == 1e-6


def test_without_cool_down_the_peak_stays() -> None:
    schedule = ScheduleConfig(total_tokens=20)
    assert [learning_rate(schedule, 0.5, tokens) for tokens in (0, 20, 21)] == [0.5, 0.5, 0.5]


def test_ratio_of_two_groups_is_constant_until_the_cool_down() -> None:
    ratios = {
        round(learning_rate(OMN_1, 0.01, tokens) / learning_rate(OMN_1, 0.0003, tokens), 9)
        for tokens in range(10**8, 164 * 10**9, 10**9)
    }
    assert len(ratios) == 1


@pytest.mark.parametrize(
    "values",
    [
        {"total_tokens": 0},
        {"total_tokens": 10, "warmup_tokens": 11},
        {"total_tokens": 10, "warmup_tokens": -1},
        {"total_tokens": 10, "stable_until_tokens": 11},
        {"total_tokens": 10, "warmup_tokens": 6, "stable_until_tokens": 5},
        {"total_tokens": 10, "floor": -1.0},
        {"total_tokens": 10, "floor": math.nan},
    ],
)
def test_impossible_schedules(values: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=r"schedule\..*found.*expected"):
        ScheduleConfig(**values)  # type: ignore[arg-type]


def test_clock_counts_accepted_tokens_only() -> None:
    clock = TokenClock()
    clock.accept(64)
    clock.reject()
    clock.reject()
    assert clock == TokenClock(accepted_tokens=64, steps=1, windows=3, rejected=2, consecutive_rejected=2)
    clock.accept(64)
    assert clock == TokenClock(accepted_tokens=128, steps=2, windows=4, rejected=2, consecutive_rejected=0)
