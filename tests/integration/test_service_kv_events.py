"""KV events over a real ZeroMQ pair: order, duplicates, gaps, replay, and what cannot be replayed.

The publisher here frames and encodes as vLLM 0.32 does (recorded from its ``ZmqEventPublisher``:
topic, 8 bytes of sequence, batch; replies of the ROUTER behind an empty frame, -1 at the end).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from stoker.errors import InputError
from stoker.service.kv_events import KvEventFollower, decode_batch

zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")

SIZE = 4


def stored(names: list[int], tokens: list[int], parent: int | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent,
        "token_ids": tokens, "block_size": SIZE, "lora_id": None, "medium": "GPU",
        "lora_name": None,
    }  # fmt: skip


def removed(names: list[int], medium: str | None = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": names, "medium": medium}


class Publisher:
    """An engine's side: a PUB socket and a ROUTER that a test serves by hand."""

    def __init__(self, *, buffer: int = 100) -> None:
        self.context = zmq.Context()
        self.pub = self.context.socket(zmq.XPUB)  # as PUB, and tells when someone subscribed
        self.port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.router = self.context.socket(zmq.ROUTER)
        self.router_port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.sent: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self.next = 0

    def wait_for_subscriber(self) -> None:
        assert self.pub.poll(60_000), "nobody subscribed"
        self.pub.recv()

    def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        payload = msgpack.packb([1.5, list(events), 0])
        self.sent.append((self.next, payload))
        if not lost:
            self.pub.send_multipart((b"kv", self.next.to_bytes(8, "big"), payload))
        self.next += 1

    def serve_replay(self) -> int:
        assert self.router.poll(60_000), "no replay was asked for"
        client, _, start = self.router.recv_multipart()
        first = int.from_bytes(start, "big")
        for sequence, payload in self.sent:
            if sequence >= first:
                self.router.send_multipart(
                    (client, b"", b"kv", sequence.to_bytes(8, "big"), payload)
                )
        end = (-1).to_bytes(8, "big", signed=True)
        self.router.send_multipart((client, b"", b"", end, b""))
        return first

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    engine = Publisher()
    yield engine
    engine.close()


def follow(publisher: Publisher, *, replay: bool = True) -> KvEventFollower:
    follower = KvEventFollower(
        f"tcp://127.0.0.1:{publisher.port}",
        f"tcp://127.0.0.1:{publisher.router_port}" if replay else "",
        topic="kv",
        replay_timeout_s=60.0,
    )
    publisher.wait_for_subscriber()
    return follower


def test_stored_removed_cleared(publisher: Publisher) -> None:
    follower = follow(publisher)
    try:
        publisher.publish(stored([1, 2], [*range(8)]))
        publisher.publish(stored([3], [8, 9, 10, 11], parent=2))
        assert follower.wait_for(2, timeout_s=60)
        assert follower.matched(list(range(14))) == 12
        assert follower.matched([0, 1, 2, 3, 9]) == 4
        assert follower.matched([7, 7, 7, 7]) == 0
        publisher.publish(removed([2]))
        assert follower.wait_for(3, timeout_s=60)
        assert follower.matched(list(range(14))) == 4
        publisher.publish({"type": "AllBlocksCleared"})
        assert follower.wait_for(4, timeout_s=60)
        assert follower.counts() == {
            "blocks": 0, "batches": 4, "gaps": 0, "losses": 0, "refused": 0
        }  # fmt: skip
    finally:
        follower.close()


def test_a_gap_is_filled_by_replay_in_order(publisher: Publisher) -> None:
    follower = follow(publisher)
    try:
        publisher.publish(stored([1], [0, 1, 2, 3]))
        assert follower.wait_for(1, timeout_s=60)
        publisher.publish(removed([1]), lost=True)
        publisher.publish(stored([2], [0, 1, 2, 3]), lost=True)
        publisher.publish(stored([5], [4, 5, 6, 7], parent=2))
        assert publisher.serve_replay() == 1
        assert follower.wait_for(4, timeout_s=60)
        assert follower.matched(list(range(8))) == 8
        assert follower.counts()["gaps"] == 1
        assert follower.counts()["losses"] == 0
    finally:
        follower.close()


def test_who_comes_late_reads_the_past(publisher: Publisher) -> None:
    publisher.publish(stored([1], [0, 1, 2, 3]))
    follower = follow(publisher)
    try:
        publisher.publish(stored([2], [4, 5, 6, 7], parent=1))
        assert publisher.serve_replay() == 0
        assert follower.wait_for(2, timeout_s=60)
        assert follower.matched(list(range(8))) == 8
    finally:
        follower.close()


def test_what_cannot_be_replayed_is_not_believed() -> None:
    engine = Publisher(buffer=1)  # its buffer holds the newest batch alone
    follower = follow(engine)
    try:
        engine.publish(stored([1], [0, 1, 2, 3]))
        assert follower.wait_for(1, timeout_s=60)
        engine.publish(removed([1]), lost=True)
        engine.publish(stored([9], [5, 5, 5, 5]))
        engine.serve_replay()
        assert follower.wait_for(2, timeout_s=60)
        assert follower.matched([0, 1, 2, 3]) == 0, "its removal was lost"
        assert follower.matched([5, 5, 5, 5]) == 4
        assert follower.counts()["losses"] == 1
    finally:
        follower.close()
        engine.close()


def test_an_engine_that_starts_anew_has_nothing(publisher: Publisher) -> None:
    follower = follow(publisher, replay=False)
    try:
        publisher.publish(stored([1], [0, 1, 2, 3]))
        publisher.publish(stored([2], [4, 5, 6, 7], parent=1))
        assert follower.wait_for(2, timeout_s=60)
        publisher.next = 0
        publisher.publish(stored([3], [8, 8, 8, 8]))
        assert follower.wait_for(3, timeout_s=60)
        assert follower.matched(list(range(8))) == 0
        assert follower.matched([8, 8, 8, 8]) == 4
    finally:
        follower.close()


def test_a_batch_that_is_none_empties_the_view(publisher: Publisher) -> None:
    follower = follow(publisher)
    try:
        publisher.publish(stored([1], [0, 1, 2, 3]))
        publisher.pub.send_multipart((b"kv", (1).to_bytes(8, "big"), b"\xc1"))
        assert follower.wait_for(2, timeout_s=60)
        assert follower.counts()["refused"] == 1
        assert follower.matched([0, 1, 2, 3]) == 0
    finally:
        follower.close()


def test_the_array_form_of_earlier_versions_is_read() -> None:
    batch = [2.0, [["BlockStored", [7], None, [1, 2], 2, None, "CPU"], ["BlockRemoved", [7], "CPU"],
                   ["AllBlocksCleared"], ["Unheard", 1]]]  # fmt: skip
    first, second, third = decode_batch(msgpack.packb(batch))
    assert getattr(first, "token_ids", None) == (1, 2)
    assert getattr(second, "medium", None) == "CPU"
    assert type(third).__name__ == "AllBlocksCleared"


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgpack.packb({}), msgpack.packb([1.0, [{}]])])
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(InputError, match="KV events"):
        decode_batch(payload)
