"""What `stoker bench coldstart` measures: sizes, rates, files, and what it compares."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from stoker.errors import ConfigError
from stoker.service.coldstart.throttle import CLOUD_VOLUME, OWN_DISK, Volume

IN_TRAFFIC = "in-traffic"
SCENARIOS = ("restart", "scale-out", "rebuild", "drift", IN_TRAFFIC)
SCENARIO_TEXTS = {
    "restart": "the same replica comes back, its heat's snapshot on disk",
    "scale-out": "a new replica with the event log only; rebuilding the heat counts",
    "rebuild": "the index was rebuilt: rows permuted, another seed, sealed without heat",
    "drift": "the traffic after the start asks for other passages than before",
    IN_TRAFFIC: "a restart, and the traffic does not wait until it is ready",
}
METHODS = (
    "none",
    "sequential",
    "level-order",
    "last-blocks",
    "most-recent",
    "w-tinylfu",
    "oracle",
    "all",
    "stoker",
)
METHOD_LABELS = {
    "none": "nothing",
    "sequential": "sequential preload",
    "level-order": "level order, by id",
    "last-blocks": "last block list",
    "most-recent": "most recent pages",
    "w-tinylfu": "W-TinyLFU's content",
    "oracle": "oracle",
    "all": "load everything",
    "stoker": "Stoker",
}
UNBUDGETED = ("none", "all")
_SMALL_METHODS = ("none", "last-blocks", "oracle", "all", "stoker")
# Where the traffic does not wait, it is asked what loading does to it: for that these are enough.
IN_TRAFFIC_METHODS = ("none", "oracle", "all", "stoker")


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Settings of one run.

    Attributes:
        out: Where results and plots go; what can be kept for the next run lies in its `work`.
        vectors_path: `.npy` of embeddings; None generates some.
        requests_path: A recording of searches; None generates one.
        arrivals_path: When requests come; None takes the recording's own times.
        total: Vectors in all, padded with generated near neighbours.
        generated_count, generated_dim: Size of the generated embeddings.
        rate: Requests a second.
        seconds: Length of the measured traffic.
        history_ratio: Share of the recording that is before the stop.
        history_max: Of the requests before the stop, the last so many are kept.
        drift_ratio: Share of the passages that are exchanged for others in the drift scenario.
        budget_ratio: Share of the index's bytes that may be loaded.
        window_s: Length of the windows that time-to-SLO looks at.
        repeats: Starts of each method in each scenario.
        recorded: Queries before the stop whose pages are recorded.
        judged: Queries whose answers are compared with exact search.
        volume: The disk, by name: "cloud" (throttled where the kernel lets us) or "own".
        volume_iops, volume_bytes_s: Limits of the cloud volume.
        threads: Threads that answer; 0 means two per processor, as a server does.
    """

    out: Path = Path("bench-results/coldstart")
    vectors_path: Path | None = None
    requests_path: Path | None = None
    arrivals_path: Path | None = None
    total: int = 100_000
    generated_count: int = 8_000
    generated_dim: int = 384
    rate: float = 80.0
    seconds: float = 20.0
    history_ratio: float = 0.6
    history_max: int = 50_000
    drift_ratio: float = 0.5
    budget_ratio: float = 0.2
    window_s: float = 4.0
    repeats: int = 3
    recorded: int = 1_000
    judged: int = 400
    k: int = 10
    recall_target: float = 0.95
    recall_aim: float = 0.97
    scenarios: tuple[str, ...] = SCENARIOS
    methods: tuple[str, ...] = METHODS
    volume: str = "cloud"
    volume_iops: int = CLOUD_VOLUME.iops
    volume_bytes_s: int = CLOUD_VOLUME.bytes_s
    threads: int = 0
    seed: int = 7
    plots: bool = True

    def __post_init__(self) -> None:
        counted = math.isfinite(self.rate) and math.isfinite(self.seconds)
        bounds = (
            ("total", 100 <= self.total <= 20_000_000, "100 to 20,000,000"),
            ("rate", 0 < self.rate <= 10_000, "above 0, up to 10,000"),
            ("seconds", 0.1 <= self.seconds <= 3_600, "0.1 to 3,600"),
            ("history_ratio", 0 < self.history_ratio < 1, "above 0, below 1"),
            ("drift_ratio", 0 <= self.drift_ratio <= 1, "0 to 1"),
            ("budget_ratio", 0 < self.budget_ratio <= 1, "above 0, up to 1"),
            ("window_s", 0 < self.window_s <= self.seconds, "above 0, up to the seconds"),
            ("repeats", 1 <= self.repeats <= 100, "1 to 100"),
            ("volume", self.volume in ("own", "cloud"), "own or cloud"),
            ("threads", 0 <= self.threads <= 256, "0 to 256"),
            (
                "count",
                counted and self.count >= 20,
                "at least 20 requests: more seconds or a higher rate",
            ),
        )
        for key, fits, expected in bounds:
            if not fits:
                raise ConfigError(
                    f"bench coldstart {key}: expected {expected}, found {getattr(self, key)}"
                )
        for name, found, known in (
            ("scenarios", self.scenarios, SCENARIOS),
            ("methods", self.methods, METHODS),
        ):
            if not found or set(found) - set(known):
                raise ConfigError(
                    f"bench coldstart {name}: expected some of {', '.join(known)}, "
                    f"found {', '.join(found) or 'none'}"
                )

    @property
    def count(self) -> int:
        """Requests measured."""
        return int(self.rate * self.seconds)

    @property
    def disk(self) -> Volume:
        """The disk to measure on."""
        if self.volume == "own":
            return OWN_DISK
        label = f"a volume of {self.volume_iops:,} IOPS and {self.volume_bytes_s / 1e6:g} MB/s"
        return Volume("cloud", label, iops=self.volume_iops, bytes_s=self.volume_bytes_s)


def small(options: BenchOptions) -> BenchOptions:
    """Return the size that takes half a minute: generated data, few methods, no figures to quote.

    Files, scenarios and methods that were given stay given.
    """
    return dataclasses.replace(
        options,
        total=4_000,
        generated_count=2_000,
        generated_dim=48,
        rate=100.0,
        seconds=0.8,
        window_s=0.2,
        history_max=400,
        repeats=1,
        recorded=60,
        judged=40,
        methods=_SMALL_METHODS if options.methods == METHODS else options.methods,
        volume="own",
    )
