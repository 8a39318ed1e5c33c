"""`python -m stoker` is the `stoker` command."""

from __future__ import annotations

import sys

from stoker.service.cli import main

if __name__ == "__main__":
    sys.exit(main())
