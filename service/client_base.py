"""What the SDK's two clients share: where the servers are, who asks, and how patiently."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.errors import InputError
from stoker.service.answers import SearchAnswer
from stoker.service.client_servers import ClientServers, ServerUrl
from stoker.service.problems import ServerUnreachable
from stoker.service.wire import Attempts, Body, Call, RetryPolicy, check_deadline, search_call

DEFAULT_URL = "http://127.0.0.1:8080"
_USER_AGENT = "stoker-sdk/1"
# Eight of the longest bodies that a server takes by default: room for a thousand results with
# their texts, of 256 KiB each, and no more than a program can spare for a server that goes wild.
ANSWER_BYTES_MAX = 256 << 20
# Of the client's deadline, for the server; the rest is for its answer to come back in.
_SEARCH_SHARE = 0.9


class ClientBase(abc.ABC):
    """Where the servers are, who asks, and how patiently."""

    def __init__(
        self,
        url: str | Sequence[str] = DEFAULT_URL,
        *,
        key: str | None = None,
        tenant: str | None = None,
        deadline_s: float = 10.0,
        retries: RetryPolicy | None = None,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
    ) -> None:
        """Point at a server, or at several over the same documents; nothing is sent yet.

        Args:
            url: Scheme, host, port and, behind a proxy, a path prefix. Of several, calls ask one
                after another in turn, and what one cannot do now the next is asked at once, as far
                as the same work may be done twice; writes find the one that takes them. What is
                about one server (readiness, warm-up, metrics) needs a client of its own.
            key: Bearer key of the tenant; None where the server asks for none.
            tenant: Whose documents; None takes the key's, or the server's default.
            deadline_s: How long a call may take in all, retries and waits included.
            retries: None takes `RetryPolicy()`.
            answer_bytes_max: Longest answer that is read; a longer one is `AnswerTooLarge`.

        Raises:
            InputError: ``url`` is no http or https URL, or given twice, ``key`` does not fit a
                header, ``deadline_s`` is not above 0, or above a week, or ``answer_bytes_max`` is
                no number above 0.
        """
        check_deadline(deadline_s, "deadline_s")
        if type(answer_bytes_max) is not int or answer_bytes_max < 1:
            raise InputError(
                f"answer_bytes_max: expected a whole number above 0, found {answer_bytes_max!r:.40}"
            )
        self.answer_bytes_max = answer_bytes_max
        self.tenant = tenant
        self.deadline_s = deadline_s
        self._retries = RetryPolicy() if retries is None else retries
        self._servers = ClientServers(url, self._retries)
        self._headers = {"User-Agent": _USER_AGENT, "Accept": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {_checked_key(key)}"
        self._begin()

    @property
    def url(self) -> str:
        """The server's URL, or those of all, with commas between them."""
        return ", ".join(server.url for server in self._servers.all)

    @abc.abstractmethod
    def _begin(self) -> None:
        """Make what this kind of client keeps between calls."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, tenant={self.tenant!r})"  # never the key

    def _attempts(self, call: Call[Any], deadline_s: float | None) -> Attempts:
        return Attempts(
            self._retries,
            idempotent=call.idempotent,
            deadline_s=self.deadline_s if deadline_s is None else deadline_s,
        )

    def _call_headers(self, call: Call[Any]) -> dict[str, str]:
        headers = {**self._headers, "X-Request-Id": call.id}
        if call.body is not None:
            headers["Content-Type"] = call.content_type
        return headers

    def _body(self, server: ServerUrl, stated: int | None) -> Body:
        return Body(self.answer_bytes_max, stated=stated, where=server.url)

    def _unreachable(self, server: ServerUrl, error: BaseException) -> ServerUnreachable:
        # The system's own words, without its number.
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        failure = ServerUnreachable(
            f"{server.url}: {reason}",
            where=server.url,
            action="check that the server runs and that the URL is right",
        )
        failure.__cause__ = error
        return failure

    def _search(self, deadline_ms: int | None, members: Mapping[str, Any]) -> Call[SearchAnswer]:
        if deadline_ms is None:
            deadline_ms = max(1, int(self.deadline_s * 1e3 * _SEARCH_SHARE))
        return search_call(tenant=self.tenant, deadline_ms=deadline_ms, **members)

    def _warmup_patience(self, deadline_s: float | None, wait: bool) -> float | None:
        return deadline_s + self.deadline_s if wait and deadline_s is not None else None


def _checked_key(key: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(
            f"key: expected printable ASCII without a space, found {len(key)} characters of which "
            "some are not (a line's end, perhaps)"
        )
    return key
