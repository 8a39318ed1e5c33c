"""Append numbered records for ever; print each number once it is acknowledged.

Usage: child_append.py FOLDER NAME BATCH. The parent kills it at any moment.
"""

from __future__ import annotations

import sys

from stoker.service.embedded_log import EmbeddedLog


def main() -> None:
    folder, name, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
    log = EmbeddedLog(folder)
    number = 0
    while True:
        values = [b"%s %d %s" % (name.encode(), number + i, b"." * 300) for i in range(batch)]
        log.append("t", name.encode(), values)
        number += batch
        # Whole and at once, or not at all: what the parent reads was acknowledged.
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


main()
