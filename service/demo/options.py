"""What the demo does, as one value: sizes, seeds, folders, and what it compares on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from stoker.errors import ConfigError
from stoker.service.embedding import BUNDLED
from stoker.service.kafka_options import KafkaOptions


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """Settings of one demo run.

    Attributes:
        folder: Where the index, the events, the heat and the results are kept.
        report_path: Where the HTML report goes; the JSON results go beside it.
        model: Embedding model; see `stoker.service.embedding`.
        embed_s: Seconds for embedding; the passages that are done by then are the corpus.
        words: Words of a passage. Short ones embed faster, so more of the library fits.
        padded_to: Vectors in all; 0 leaves the real ones alone.
        searches: Searches of the traffic that the heat is made from.
        queries: Queries measured after each cold start's first answer: the traffic's next ones.
        seed: Everything made up follows from it.
        budget_ratio: Share of the index's bytes that Stoker may read before it is ready.
        repeats: Cold starts of each kind on each disk.
        cloud: Whether to measure on a throttled disk too, where the machine allows it.
        kafka: ``HOST:PORT`` of a broker; empty keeps events on this disk.
        fresh: Whether to do everything again, the embedding cache aside.
        threads: For embedding and building; 0 means one per processor, two at most.
    """

    folder: Path = Path(".stoker/demo")
    report_path: Path = Path("demo-report/index.html")
    model: str = BUNDLED
    embed_s: float = 75.0
    words: int = 70
    padded_to: int = 100_000
    searches: int = 6_000
    queries: int = 200
    seed: int = 7
    budget_ratio: float = 0.2
    repeats: int = 5
    cloud: bool = True
    kafka: str = ""
    fresh: bool = False
    threads: int = 0

    def __post_init__(self) -> None:
        bounds = (
            ("embed_s", self.embed_s > 0, "more than 0"),
            ("words", 10 <= self.words <= 1_000, "10 to 1,000"),
            ("padded_to", 0 <= self.padded_to <= 20_000_000, "0 to 20,000,000"),
            ("searches", 1 <= self.searches <= 1_000_000, "1 to 1,000,000"),
            ("queries", 10 <= self.queries <= 10_000, "10 to 10,000"),
            ("budget_ratio", 0 < self.budget_ratio <= 1, "above 0, up to 1"),
            ("repeats", 1 <= self.repeats <= 100, "1 to 100"),
            ("threads", self.threads >= 0, "0 or more"),
        )
        if self.kafka:  # before a minute of work, not after it
            KafkaOptions(self.kafka)
        for key, fits, expected in bounds:
            if not fits:
                raise ConfigError(f"demo {key}: expected {expected}, found {getattr(self, key)}")
