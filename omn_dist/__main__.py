"""``python -m omn_dist`` is the same command as ``omn-dist``."""

import sys

from omn_dist.cli import main

if __name__ == "__main__":
    sys.exit(main())
