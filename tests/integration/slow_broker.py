"""A proxy before a Kafka broker that holds back its answers to some requests.

What a busy broker does to a client, without a busy machine: the broker has a listener that names
the proxy's port as its own, so that clients come back here whatever they learn from it.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from types import TracebackType

SYNC_GROUP = 14  # the number of a request, in the frame behind its length


class SlowBroker:
    """Listens on one loopback port and passes everything on to another.

    `delay_s` says by request how much longer its answer takes; what comes behind it on the same
    connection waits too, as it does at a broker.
    """

    def __init__(self, port: int, broker_port: int) -> None:
        self.bootstrap = f"127.0.0.1:{port}"
        self.delay_s: dict[int, float] = {}
        self._broker_port = broker_port
        self._listening = socket.create_server(("127.0.0.1", port))
        self._sockets = [self._listening]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> SlowBroker:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The first thread adds to both lists: it ends first.
        _cut(self._listening)
        self._threads[0].join()
        for connection in self._sockets:
            _cut(connection)
        for thread in self._threads:
            thread.join()
        for connection in self._sockets:
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # shut down
            while True:
                client, _ = self._listening.accept()
                broker = socket.create_connection(("127.0.0.1", self._broker_port))
                self._sockets += [client, broker]
                asked: queue.SimpleQueue[int] = queue.SimpleQueue()
                for pump in (
                    threading.Thread(target=self._ask, args=(client, broker, asked), daemon=True),
                    threading.Thread(
                        target=self._answer, args=(client, broker, asked), daemon=True
                    ),
                ):
                    pump.start()
                    self._threads.append(pump)

    def _ask(
        self, client: socket.socket, broker: socket.socket, asked: queue.SimpleQueue[int]
    ) -> None:
        with contextlib.suppress(OSError):
            while frame := _frame(client):
                asked.put(struct.unpack_from(">h", frame, 4)[0])
                broker.sendall(frame)
        _cut(broker)

    def _answer(
        self, client: socket.socket, broker: socket.socket, asked: queue.SimpleQueue[int]
    ) -> None:
        # A broker answers a connection's requests in their order.
        with contextlib.suppress(OSError):
            while frame := _frame(broker):
                time.sleep(self.delay_s.get(asked.get(), 0.0))
                client.sendall(frame)
        _cut(client)


def _frame(connection: socket.socket) -> bytes:
    """Read one frame with its length; nothing where the other side has ended."""
    frame, wanted = b"", 4
    while len(frame) < wanted:
        part = connection.recv(wanted - len(frame))
        if not part:
            return b""
        frame += part
        if len(frame) == 4:
            wanted = 4 + struct.unpack(">i", frame)[0]
    return frame


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
