"""LMCache's warm prefetch as an engine for `kvcache.engine_warm`: HTTP calls, one at a time.

Written against LMCache 0.5.6, whose server takes ``POST /cache/prefetches`` and
``GET /cache/prefetches/{id}``; builds before it call the same ``/l2/prefetch``, which is tried
where the first is unknown. What it loads is an ordinary entry that it may evict: LMCache has no
lease of its own, so a lease here is a promise to ask again, and giving it back is to stop asking.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import structlog

from stoker.errors import InputError, UnavailableError
from stoker.kvcache.engine_warm import Ticket

log = structlog.get_logger(__name__)

PATHS = ("/cache/prefetches", "/l2/prefetch")
_TOKENS_MAX = 1_000_000  # the server's own limit
_ANSWER_BYTES_MAX = 1 << 20
_OPEN_MAX = 10_000


class PrefetchFenced(UnavailableError):
    """The engine was told of a newer generation since; this call is of the past."""


class LmcachePrefetch:
    """A `kvcache.engine_warm.PrefetchEngine` that speaks LMCache's HTTP interface. Thread-safe.

    Fence: a call of an older generation than the newest seen is refused here, before it costs the
    engine anything, however late a thread comes with it.

    Args:
        url: Of LMCache's server, as ``http://host:port``.
        model_name: As the engine calls the model.
        world_size: Ranks of the engine.
        cache_salt: Keeps tenants apart, as in the engine's requests.
        timeout_s: Of a call.
    """

    def __init__(
        self,
        url: str,
        *,
        model_name: str,
        world_size: int = 1,
        cache_salt: str = "",
        timeout_s: float = 2.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment:
            raise InputError(f"url: expected http://host:port, found {url!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._model_name = model_name
        self._world_size = world_size
        self._cache_salt = cache_salt
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._path: str | None = None  # which of PATHS the server knows
        self._generation: int | None = None
        self._open: OrderedDict[Ticket, None] = OrderedDict()  # submitted, not seen to be done
        self._noops = 0

    def prefetch(self, token_ids: Sequence[int], *, lease_s: float, generation: int) -> Ticket:
        """Ask for a sequence; see `PrefetchEngine`.

        Raises:
            PrefetchFenced: the generation is over.
            InputError: more tokens than the server takes.
            UnavailableError: the server refused, cannot be reached, or answers something else.
        """
        if len(token_ids) > _TOKENS_MAX:
            raise InputError(f"token_ids: expected at most {_TOKENS_MAX}, found {len(token_ids)}")
        with self._lock:
            if self._generation is not None and generation < self._generation:
                raise PrefetchFenced(
                    f"expected generation {self._generation} or later, found {generation}"
                )
            self._generation = generation
        body = {
            "model_name": self._model_name,
            "world_size": self._world_size,
            "token_ids": list(token_ids),
            "cache_salt": self._cache_salt,
        }
        status, answer = self._ask("POST", "", body)
        if status not in (200, 202):
            raise UnavailableError(f"LMCache answered {status}: {answer.get('detail', '')!s:.200}")
        request_id = answer.get("request_id")
        if request_id is None:
            if answer.get("status") != "noop":
                raise UnavailableError(f"expected a request_id from LMCache, found {answer!r:.200}")
            # Shorter than one of its chunks: there is nothing to load and nothing to poll.
            with self._lock:
                self._noops += 1
                return Ticket(f"noop-{self._noops}")
        ticket = Ticket(str(request_id))
        with self._lock:
            self._open[ticket] = None
            while len(self._open) > _OPEN_MAX:
                self._open.popitem(last=False)
        return ticket

    def progress(self, ticket: Ticket) -> tuple[str, int, int]:
        """Return ("pending" | "completed" | "unknown", chunks found, chunks in all).

        The first answer that says "completed" may be the only one: the server then forgets the id.

        Raises:
            UnavailableError: the server cannot be reached or answers something else.
        """
        if ticket.startswith("noop-"):
            return "completed", 0, 0
        status, answer = self._ask("GET", f"/{ticket}", None)
        if status == 404:
            state = "unknown"
        elif status == 200 and answer.get("status") in ("pending", "completed"):
            state = str(answer["status"])
        else:
            raise UnavailableError(f"LMCache answered {status}: {answer!r:.200}")
        if state != "pending":
            with self._lock:
                self._open.pop(ticket, None)
        return state, int(answer.get("found_keys", 0)), int(answer.get("total_keys", 0))

    def release(self, ticket: Ticket) -> None:
        """Stop asking for it; the server holds no lock for us."""
        with self._lock:
            self._open.pop(ticket, None)

    def pending(self) -> list[Ticket]:
        """Return what was asked for and not yet seen to be done."""
        with self._lock:
            return list(self._open)

    def _ask(
        self, method: str, rest: str, body: dict[str, Any] | None
    ) -> tuple[int, dict[str, Any]]:
        with self._lock:
            known = self._path
        for path in (known,) if known is not None else PATHS:
            status, answer = self._call(method, f"{self._prefix}{path}{rest}", body)
            # Before an id is given there is nothing that could be unknown but the path.
            if status in (404, 405) and known is None and method == "POST":
                continue
            if known is None and method == "POST" and status < 500:
                with self._lock:
                    self._path = path
            return status, answer
        return 404, {"detail": f"none of {', '.join(PATHS)} is known to the server"}

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            raw = None if body is None else json.dumps(body).encode()
            connection.request(method, path, raw, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read(_ANSWER_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"LMCache at {self._host}:{self._port}: {error}") from error
        finally:
            connection.close()
        try:
            answer = json.loads(text) if text else {}
        except (ValueError, RecursionError):
            answer = {}
        return response.status, answer if isinstance(answer, dict) else {}
