"""The servers that one client of the SDK may ask: whose turn it is, and who was away a moment ago.

Calls go round. A call that one server cannot take goes to the next at once, and only when all were
asked does it wait and begin anew. Nothing here does I/O.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from stoker.errors import InputError
from stoker.service.problems import FeatureOff, NotReady, ServerUnreachable, ServiceError
from stoker.service.wire import Call, RetryPolicy


@dataclass(frozen=True)
class ServerUrl:
    """Where one server is.

    Attributes:
        url: As given, without a slash at its end.
        parts: Of it.
        prefix: Path in front of every call's, behind a proxy.
    """

    url: str
    parts: SplitResult
    prefix: str

    @classmethod
    def parse(cls, url: Any) -> ServerUrl:
        """Read a URL. Raises InputError for what is none, without showing a password."""
        if not isinstance(url, str):
            raise InputError(f"url: expected text, found {type(url).__name__}")
        try:
            parts = urlsplit(url)
            port = parts.port  # looked at, it is checked
        except ValueError as error:
            raise InputError(f"url: {error}") from error
        if parts.username is not None or parts.query or parts.fragment:
            # Not shown: a password may be in it.
            raise InputError("url: expected no user, query or fragment; a key is given as `key`")
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise InputError(f"url: expected http://HOST:PORT or https://HOST:PORT, found {url!r}")
        return cls(url.rstrip("/"), parts, parts.path.rstrip("/"))


class ClientServers:
    """The servers of one client. Any thread may call anything.

    Invariant: a server that was away is asked last, until its time is up or another call finds it
    back, and never left out: it may be the only one that is left.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        policy: RetryPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take one URL, or several of servers over the same documents.

        Raises:
            InputError: none is given, one is given twice, or one is no URL.
        """
        if not isinstance(urls, str | Sequence):
            raise InputError(f"url: expected text or a list, found {type(urls).__name__}")
        given = [urls] if isinstance(urls, str) else list(urls)
        self.all = tuple(ServerUrl.parse(url) for url in given)
        if not self.all or len({server.url for server in self.all}) < len(self.all):
            raise InputError(f"url: expected one or several different ones, found {given}")
        self._policy = policy
        self._clock = clock
        self._next = itertools.count()
        self._lock = threading.Lock()
        self._away_until = dict.fromkeys(self.all, 0.0)
        self._away_times = dict.fromkeys(self.all, 0)
        self._has: dict[str, ServerUrl] = {}

    def begin_in_child(self) -> None:
        """Go on after a fork, in which another thread may have held the lock."""
        self._lock = threading.Lock()

    def turn(self, call: Call[Any]) -> ServerTurn:
        """Begin a call.

        Raises:
            InputError: it is about one server, and there are several.
        """
        if call.one_server and len(self.all) > 1:
            raise InputError(
                f"{call.method} {call.path} is about one server, and this client has "
                f"{len(self.all)}: make a client of the one that is meant"
            )
        return ServerTurn(self, call)

    def order(self, needs: str) -> list[ServerUrl]:
        """Return all servers in the order in which the next call asks them.

        Args:
            needs: What not every server has; the one that last had it comes first.
        """
        with self._lock:
            first = next(self._next) % len(self.all)
            turned = [*self.all[first:], *self.all[:first]]
            now, had = self._clock(), self._has.get(needs)
            return sorted(turned, key=lambda one: (self._away_until[one] > now, one is not had))

    def failed(self, server: ServerUrl) -> None:
        """Ask this one last for a while: the longer, the more often in a row it was away."""
        with self._lock:
            times = self._away_times[server] = min(self._away_times[server] + 1, 30)
            away_s = min(self._policy.backoff_s_max, self._policy.backoff_s * 2.0**times)
            self._away_until[server] = self._clock() + away_s

    def answered(self, server: ServerUrl, needs: str) -> None:
        """Note that this one is there, and has what the call needed."""
        with self._lock:
            self._away_until[server], self._away_times[server] = 0.0, 0
            if needs:
                self._has[needs] = server


class ServerTurn:
    """One call's way through the servers."""

    def __init__(self, servers: ClientServers, call: Call[Any]) -> None:
        """Begin with the server whose turn it is."""
        self._servers = servers
        self._needs = call.needs
        self._left = servers.order(call.needs)

    @property
    def server(self) -> ServerUrl:
        """Who is asked now."""
        return self._left[0]

    def share_s(self, left_s: float) -> float:
        """Return how long connecting to this one may take, so that each gets its chance."""
        return left_s / len(self._left)

    def answered(self) -> None:
        """Note that the one who was asked gave the answer."""
        self._servers.answered(self.server, self._needs)

    def failed(self, error: ServiceError) -> bool:
        """Go on to the next; tells whether there is one that this round has not asked."""
        if isinstance(error, (ServerUnreachable, NotReady)):
            self._servers.failed(self.server)
        elif isinstance(error, FeatureOff):
            self._servers.answered(self.server, "")
        del self._left[0]
        if self._left:
            return True
        self._left = self._servers.order(self._needs)
        return False
