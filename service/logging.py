"""Set up structured logging once, at the edge: the rooms only call `structlog.get_logger`.

Lines go to standard error, so that standard output stays a command's answer. A terminal gets text,
anything else one JSON object a line. Values whose key says that they are secret are masked here,
whoever logs them.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Final, Literal, TextIO, cast

import orjson
import structlog

Level = Literal["debug", "info", "warning", "error"]
LEVELS: Final = ("debug", "info", "warning", "error")

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
log = structlog.get_logger(__name__)

_SECRET_WORDS = ("api_key", "authorization", "bearer", "password", "secret")


class _Stderr(io.TextIOBase):
    """Standard error as it is when a line is written: programs put others in its place.

    A line that cannot be written (its file's disk is full, its reader has gone, there is none) is
    lost. It never raises: a server must not stop, nor answer 500, because nobody reads its log.
    """

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it was closed
            if sys.stderr is not None:
                sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr is not None:
                sys.stderr.flush()

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return sys.stderr is not None and sys.stderr.isatty()
        return False


def configure_logging(
    level: Level = "info",
    form: Literal["auto", "json", "text"] = "auto",
    *,
    stream: TextIO | None = None,
) -> None:
    """Send structlog's and the standard library's lines to ``stream`` (default: stderr).

    Libraries that use the standard `logging` (aiohttp, kafka) are written in the same form, from
    "warning" up: their information lines are about themselves, not about our decisions.
    """
    out: Any = _Stderr() if stream is None else stream
    if form == "auto":
        form = "text" if out.isatty() else "json"
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        mask_secrets,
    ]
    last: list[Any] = (
        [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_dumps),
        ]
        if form == "json"
        # Plain tracebacks: the pretty ones print local variables, and with them keys and texts.
        else [
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    )
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(_LEVELS[level], logging.WARNING))


def log_level() -> Level:
    """Return the level from which on this process's lines are written."""
    written: int = structlog.get_logger().get_effective_level()
    return next(name for name in LEVELS if _LEVELS[name] >= written)


def set_log_level(level: Level) -> None:
    """Write lines from this level on; takes effect at once, for every thread of the process."""
    before = log_level()
    change = {"before": before, "after": level}
    if _LEVELS[before] <= _LEVELS["warning"]:  # said while it can still be read
        log.warning("service.log_level_set", **change)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]))
    logging.getLogger().setLevel(max(_LEVELS[level], logging.WARNING))
    if _LEVELS[before] > _LEVELS["warning"]:
        log.warning("service.log_level_set", **change)


def configure_quietly() -> None:
    """Where the host program configured nothing: warnings and errors only, to standard error.

    Unconfigured, structlog prints every line to standard output, which is not a library's to use.
    """
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(_LEVELS["warning"]),
            logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Stderr())),
            cache_logger_on_first_use=False,
        )


def mask_secrets(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Replace the value of every key whose name says that it is secret."""
    for key in event:
        if any(word in key.lower() for word in _SECRET_WORDS):
            event[key] = "***"
    return event


def _dumps(value: Any, **_: Any) -> str:
    try:
        return orjson.dumps(
            value, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        ).decode()
    except TypeError:  # an integer beyond 64 bits, say: a log line must never stop the work
        return orjson.dumps({key: str(item) for key, item in value.items()}).decode()
