"""The `stoker` command, also as `python -m stoker`."""

from __future__ import annotations

import sys

_INTERRUPTED = 130  # as `stoker.service.cli` says it, which is not there yet


def main() -> int:
    """Run the command; Ctrl-C while its modules are still loaded is no traceback either."""
    try:
        from stoker.service import cli
    except KeyboardInterrupt:
        sys.stderr.write("stoker: interrupted\n")
        return _INTERRUPTED
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
