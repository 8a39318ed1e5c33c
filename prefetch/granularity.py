"""Heat at three grains of time: tokens live for milliseconds, chunks for minutes, sessions longer.

``heat(age) = rate ^ (age / unit)``. Source: the project's seed text: a chunk's heat decays by
0.995 each second, which halves it in 138 s; token and session are the same law in their own unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Granularity:
    """One grain: what fades by ``rate`` every ``unit_s`` seconds."""

    name: str
    unit_s: float
    rate: float

    def heat(self, age_s: float) -> float:
        """Return what is left after ``age_s`` seconds, in (0, 1]; negative ages count as 0."""
        return float(self.rate ** (max(age_s, 0.0) / self.unit_s))

    @property
    def half_life_s(self) -> float:
        """Seconds after which half is left."""
        return self.unit_s * math.log(0.5) / math.log(self.rate)


TOKEN = Granularity("token", unit_s=0.001, rate=0.995)
CHUNK = Granularity("chunk", unit_s=1.0, rate=0.995)
SESSION = Granularity("session", unit_s=60.0, rate=0.995)
