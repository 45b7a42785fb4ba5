"""Assertions of the checks say what they compared, as those of tests do."""

import pytest

pytest.register_assert_rewrite(
    *(f"checks_{topic}" for topic in ("checkpoints", "errors", "groups", "masters", "programs", "schedules", "state", "steps"))
)
