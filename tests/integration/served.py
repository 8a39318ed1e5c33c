"""`stoker serve` in a process of its own, for the tests that need a real one.

`conftest.py` makes this importable as `served`: the tests are no package.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from stoker.index.collection_build import build_collection
from stoker.service.client import Client
from stoker.service.wire import RetryPolicy, WarmupStatus

DIM = 16
COUNT = 400
# A retry could hide an answer that got lost, so tests take the first answer or none.
ONCE = RetryPolicy(retries_max=0)


def vectors(count: int, seed: int = 1) -> Any:
    raw = np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
    return raw / np.linalg.norm(raw, axis=1, keepdims=True)


def build(path: Path, count: int = COUNT) -> Path:
    build_collection(
        path, vectors(count), [f"c{i}" for i in range(count)], metric="cosine", threads=1
    )
    return path


def warmed(client: Client, timeout_s: float = 60.0) -> WarmupStatus:
    """Wait for the end of the warm-up that runs: its receipt comes a moment after `/readyz`."""
    end_s = time.monotonic() + timeout_s
    while (status := client.warmup()).state == "running":
        assert time.monotonic() < end_s, f"still warming after {timeout_s} s: {status}"
    return status


class Server:
    """`stoker serve` in a process of its own; the port is read from what it prints."""

    def __init__(
        self,
        index: Path,
        *arguments: str,
        command: tuple[str, ...] = ("-m", "stoker"),
        **environment: str,
    ) -> None:
        self.index = index
        clean = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", *command, "serve", str(index), "--port", "0", "--json",
             *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean | environment,
        )  # fmt: skip
        self.lines: list[dict[str, Any]] = []
        self.errors: list[str] = []
        assert self.process.stderr is not None
        self._reader = threading.Thread(
            target=lambda: self.errors.extend(self.process.stderr or ()), daemon=True
        )
        self._reader.start()
        self.listening = self.line("listening")
        self.url = self.listening["url"]

    def line(self, event: str) -> dict[str, Any]:
        """Read standard output up to the line of an event."""
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.append(json.loads(text))
            if self.lines[-1]["event"] == event:
                return self.lines[-1]
        self.process.wait()
        raise AssertionError(f"ended with {self.process.returncode} before {event}: {self.log()}")

    def client(self, **arguments: Any) -> Client:
        return Client(self.url, **({"retries": ONCE, "deadline_s": 60.0} | arguments))

    def log(self) -> str:
        return "".join(self.errors)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; a second call only returns the exit code."""
        if self.process.stdout is not None and self.process.stdout.closed:
            return self.process.wait(60)
        if self.process.poll() is None:
            self.process.send_signal(number)
        assert self.process.stdout is not None
        self.lines += [json.loads(text) for text in self.process.stdout]
        code = self.process.wait(60)
        self._reader.join(60)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        # Native objects that somebody still holds at the end are said on standard error.
        assert "leaked" not in self.log(), self.log()
        return code
