"""What the garbage collector may look at in a server."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import UnavailableError
from stoker.service import app, engine_opening
from stoker.service.collector import kept_for_good
from stoker.service.commands import serve


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


class Node:
    """Something that the collector follows."""


def test_what_a_start_makes_is_never_collected_and_what_comes_later_is() -> None:
    assert gc.isenabled()
    with kept_for_good():
        assert not gc.isenabled()
        lasting = Node()
    assert gc.isenabled()
    later = Node()
    followed = {id(known) for known in gc.get_objects()}
    assert id(later) in followed
    assert id(lasting) not in followed


def test_a_failed_start_leaves_the_collector_on() -> None:
    with pytest.raises(UnavailableError), kept_for_good():
        raise UnavailableError("no index there")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with kept_for_good():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_server_opens_uncollected_and_serves_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, bool, bool]] = []

    def note(what: str) -> None:
        seen.append((what, gc.isenabled(), gc.get_freeze_count() > 0))

    def opened(path: Any, config: Any) -> Any:
        note("open")
        return SimpleNamespace()

    async def served(engine: Any, settings: Any, *, listening: Any) -> bool:
        note("serve")
        return True

    monkeypatch.setattr(engine_opening, "open_engine", opened)
    monkeypatch.setattr(app, "serve", served)
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    monkeypatch.setattr(
        serve,
        "config_from_args",
        lambda args, flags: SimpleNamespace(
            config=SimpleNamespace(
                service=SimpleNamespace(log_level="error", log_format="json"),
            )
        ),
    )
    monkeypatch.setattr("stoker.service.logging.configure_logging", lambda *_: None)
    flags = ["host", "port", "warm", "embed_model", "kafka", "memory", "state_dir"]
    args = SimpleNamespace(**dict.fromkeys(flags), read_only=False, json=True, index="x")
    assert serve.run(args) == 0  # type: ignore[arg-type]
    assert seen == [("open", False, False), ("serve", True, True)]
