"""What the engine benchmark asks of an engine.

A peer builds a folder once and is then opened in fresh processes. An *effort* is the peer's own
knob that trades time for recall; the benchmark walks it and reads speeds off at equal recall.
"""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
M = 16
EF_CONSTRUCTION = 200
EFFORTS = (
    10,
    11,
    12,
    13,
    14,
    15,
    16,
    18,
    20,
    24,
    28,
    32,
    40,
    48,
    56,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    256,
    384,
    512,
)


class Peer(abc.ABC):
    """One engine: builds a folder, opens it, answers.

    Attributes:
        package: What has to be importable.
        distribution: What has to be installed for that, with its version where it must be one.
        efforts: Values of the knob, the cheapest first.
        cold_modes: Ways of opening that the cold part compares.
        told_modes: Further ways, on a volume with limits, of an engine that can be told them.
        own_threads: Whether it searches on threads of its own, however many are asked for.
        budget_mode: Way of opening under a budget; empty where it has none.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    distribution: ClassVar[str]
    efforts: ClassVar[tuple[int, ...]] = EFFORTS
    cold_modes: ClassVar[tuple[str, ...]] = ()
    told_modes: ClassVar[tuple[str, ...]] = ()
    budget_mode: ClassVar[str] = ""
    own_threads: ClassVar[bool] = False

    def __init__(self) -> None:
        self.target = 0.0
        self.volume = (0, 0)
        self.threads = 1
        self.earlier: Vectors | None = None

    def prepare(self) -> None:
        """Import what is needed, so that opening is not charged for it."""
        __import__(self.package)

    @abc.abstractmethod
    def build(self, folder: Path, vectors: Vectors) -> None:
        """Build from unit-length vectors; inner product is the measure."""

    @abc.abstractmethod
    def open(self, folder: Path, mode: str, memory_bytes: int) -> None:
        """Open: ``resident`` brings everything into memory, other modes are the peer's own."""

    @abc.abstractmethod
    def search(self, queries: Vectors, k: int, effort: int, threads: int) -> NDArray[Any]:
        """Return ids, shape (nq, k)."""

    def warm_by(self, heat: dict[int, float]) -> bool:
        """Load what earlier queries say will be asked; return whether the peer has such a thing."""
        return False

    def counters(self) -> dict[str, float]:
        """The peer's own counters since it was opened."""
        return {}

    @classmethod
    def extra_bytes(cls, folder: Path) -> int:
        """Bytes that it holds in memory beside a cache of the budget's size."""
        return 0
