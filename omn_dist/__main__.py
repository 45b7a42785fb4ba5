"""``python -m omn_dist``: the same as ``omn-dist``."""

import sys

from omn_dist.cli import main

if __name__ == "__main__":
    sys.exit(main())
