"""The embedded log against lists and dicts, step by step."""

from __future__ import annotations

import shutil
import tempfile
import zlib
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stoker.service.embedded_log import EmbeddedLog
from stoker.service.embedded_topic import EmbeddedOptions
from stoker.service.streams import Consumer, Record, TopicSpec

KEYS = st.sampled_from([b"", b"a", b"b", b"c", b"\x00\xff"])
VALUES = st.none() | st.binary(max_size=20)
GROUPS = st.sampled_from(["g", "h"])


class LogMachine(RuleBasedStateMachine):
    """One topic, two groups of one member each; the model is a list of records per partition."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="stoker-log-"))
        self.now_s = 1000.0
        self.consumers: dict[str, Consumer] = {}

    @initialize(partitions=st.integers(1, 3), compacted=st.booleans())
    def make(self, partitions: int, compacted: bool) -> None:
        self.partitions = partitions
        self.compacted = compacted
        self.records: list[list[tuple[int, bytes, bytes | None, float]]] = [
            [] for _ in range(partitions)
        ]
        self.first = [0] * partitions
        self.next = [0] * partitions
        self.committed: dict[str, dict[int, int]] = {"g": {}, "h": {}}
        self.position: dict[str, dict[int, int]] = {}
        self.open()

    def open(self) -> None:
        options = EmbeddedOptions(
            clock=lambda: self.now_s, monotonic=lambda: self.now_s, retention_check_s=1e9
        )
        self.log = EmbeddedLog(self.folder, options)
        self.log.ensure_topic(
            TopicSpec(
                "t",
                partition_count=self.partitions,
                compacted=self.compacted,
                retention_s=500.0,
                retention_bytes=None,
            )
        )

    @rule(entries=st.lists(st.tuples(KEYS, VALUES), max_size=6))
    def append(self, entries: list[tuple[bytes, bytes | None]]) -> None:
        self.log.append_batch("t", entries)
        for key, value in entries:
            partition = zlib.crc32(key) % self.partitions
            self.records[partition].append((self.next[partition], key, value, self.now_s))
            self.next[partition] += 1

    @rule(group=GROUPS, count=st.integers(1, 9))
    def read(self, group: str, count: int) -> None:
        if group not in self.consumers:
            self.consumers[group] = self.log.consumer("t", group)
            self.position[group] = {
                p: self.committed[group].get(p, self.first[p]) for p in range(self.partitions)
            }
        found = self.consumers[group].poll(count, 0.0)
        at = self.position[group]
        expected_count = 0
        for partition in range(self.partitions):
            at[partition] = max(at[partition], self.first[partition])
            wanted = [r for r in self.records[partition] if r[0] >= at[partition]]
            expected_count += len(wanted)
            got = [r for r in found if r.partition == partition]
            assert [self.plain(r) for r in got] == wanted[: len(got)]
            if got:
                at[partition] = got[-1].offset + 1
        assert len(found) == min(count, expected_count)

    @rule(group=GROUPS, back=st.integers(0, 3))
    def commit(self, group: str, back: int) -> None:
        if group in self.consumers:
            held = self.consumers[group].assignment()
            offsets = {p: max(0, self.position[group][p] - back) for p in held}
            self.consumers[group].commit(offsets)
            self.committed[group].update(offsets)

    @rule(group=GROUPS)
    def leave(self, group: str) -> None:
        consumer = self.consumers.pop(group, None)
        if consumer is not None:
            consumer.close()

    @rule(seconds=st.integers(1, 400))
    def wait(self, seconds: int) -> None:
        # Consumers renew their leases as a live loop would.
        for _ in range(seconds // 10 + 1):
            self.now_s += min(10, seconds)
            for group in list(self.consumers):
                self.read(group, 1)

    @rule()
    def retain(self) -> None:
        self.log.topic("t").enforce_retention()
        if self.compacted:
            return
        for partition in range(self.partitions):
            kept = [r for r in self.records[partition] if r[3] >= self.now_s - 500.0]
            if len(kept) < len(self.records[partition]):
                gone = self.records[partition][len(self.records[partition]) - len(kept) - 1]
                self.first[partition] = gone[0] + 1
                self.records[partition] = kept

    @rule()
    def compact(self) -> None:
        self.log.topic("t").compact()
        if not self.compacted:
            return
        for partition in range(self.partitions):
            newest = {r[1]: r[0] for r in self.records[partition]}
            self.records[partition] = [
                r
                for r in self.records[partition]
                if newest[r[1]] == r[0] and (r[2] is not None or r[3] >= self.now_s - 500.0)
            ]

    @rule(partition=st.integers(0, 2), offset=st.integers(0, 30))
    def trim(self, partition: int, offset: int) -> None:
        if partition < self.partitions:
            self.log.topic("t").trim(partition, offset)
            cut = min(offset, self.next[partition])
            if cut > self.first[partition]:
                self.first[partition] = cut
                self.records[partition] = [r for r in self.records[partition] if r[0] >= cut]

    @rule()
    def reopen(self) -> None:
        for group in list(self.consumers):
            self.leave(group)
        self.log.close()
        self.open()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "log"):
            return
        self.log.check()
        for consumer in self.consumers.values():
            consumer.check()  # type: ignore[attr-defined]
        topic = self.log.topic("t")
        bounds = self.log.offsets("t")
        for partition in range(self.partitions):
            assert bounds[partition] == (self.first[partition], self.next[partition])
            stored = [self.plain(r) for r in topic.scan(partition, batch=3)]
            assert stored == self.records[partition]

    def plain(self, record: Record) -> tuple[int, bytes, bytes | None, float]:
        return (record.offset, record.key, record.value, record.time_s)

    def teardown(self) -> None:
        if hasattr(self, "log"):
            for consumer in self.consumers.values():
                consumer.close()
            self.log.close()
        shutil.rmtree(self.folder)


TestEmbeddedLog = LogMachine.TestCase
TestEmbeddedLog.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
