"""What the KV benchmarks share: made-up words, banking77's rows, and a report's last line."""

from __future__ import annotations

import csv
import hashlib
import os
import platform
from pathlib import Path


def machine() -> str:
    """Name the machine that a figure is of."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def last_line(of: object, command: str) -> str:
    """Close a report: a hash of what must be the same in every run, the machine, the command."""
    digest = hashlib.blake2b(repr(of).encode(), digest_size=8).hexdigest()
    return f"result {digest}; machine {machine()}; command {command}"


def made_word(number: int) -> str:
    """Spell a number as a word without digits, which the guards would compare."""
    letters = ""
    while True:
        letters += "bcdfghjklmnpqrstvwxz"[number % 20]
        number //= 20
        if not number:
            return letters + "o"


def banking77_rows(data: Path) -> list[tuple[str, str]]:
    """Return (question, intent) of banking77, training part first."""
    rows = []
    for name in ("train", "test"):
        with (data / "banking77" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            rows += [(row["text"].strip(), row["category"]) for row in csv.DictReader(file)]
    return rows
