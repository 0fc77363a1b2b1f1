"""``python -m launcher``: the command ``muster``, for processes that start it without a script on the path."""

from __future__ import annotations

import sys

from launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
