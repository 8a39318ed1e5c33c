"""`stoker serve` as a process of its own, for benchmarks that ask it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from stoker.service.client import Client


class Served:
    """A server with settings (`service.warm` as "SERVICE_WARM"), and how long its answers took."""

    def __init__(self, index: Path, state: Path, settings: Mapping[str, str]) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_")}
        given = {"SERVICE_WRITES": "off", "SERVICE_STATE_DIR": str(state), **settings}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stoker", "serve", str(index), "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=clean | {f"STOKER_{key}": value for key, value in given.items()},
        )
        assert self.process.stdout is not None
        lines = map(json.loads, self.process.stdout)
        self.url = next(line for line in lines if line["event"] == "listening")["url"]
        self.client = Client(self.url, deadline_s=60.0)
        self.seconds: list[float] = []

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            page = answer.read().decode()
        found = re.search(rf"^{name} (\S+)$", page, flags=re.MULTILINE)
        assert found, name
        return float(found[1])

    def stop(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.communicate(timeout=60)
