"""Slow ranks: each window waits for the seconds in the file that SLOW_STEPS names.

Python imports this file at its start.
"""

import os
import sys

# Ranks only, and not the tools that a launcher starts beside them.
if "SLOW_STEPS" in os.environ and "RANK" in os.environ and "omn_dist" in sys.orig_argv:
    import time
    from pathlib import Path

    from omn_dist.train import loop

    accumulate = loop.accumulate_window

    def slow_accumulate(*arguments, **options):  # type: ignore[no-untyped-def]
        time.sleep(float(Path(os.environ["SLOW_STEPS"]).read_text()))
        return accumulate(*arguments, **options)

    loop.accumulate_window = slow_accumulate
