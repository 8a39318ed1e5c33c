"""What a deployment needs, looked at one by one with the code that a server runs.

Every check calls what `stoker serve` would: the settings' loader, the page pool, the index, the
locks, the broker's client, the model. Nothing is made or changed but a scratch file in the state
folder, which is removed, and what SQLite puts beside documents that are read (-wal, -shm); a server
may run beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from stoker.errors import InputError, StokerError, UnavailableError
from stoker.service.configuration import StokerConfig
from stoker.service.settings import ServiceSettings, is_loopback

State = Literal["ok", "warn", "fail", "skip"]

_DISK_BYTES_MIN = 64 << 20  # a snapshot and the log's next segment; below, writes end soon
_DISK_BYTES_GOOD = 1 << 30
_MEMORY_RATIO_MAX = 0.9
_MODEL_S = 120.0
_PACKAGES = ("stoker", "numpy", "aiohttp", "structlog", "orjson")


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What it is.
        state: "ok"; "warn": a server runs without; "fail": it does not; "skip": not looked at.
        found: What is so.
        action: What to do about it; "" where nothing is.
    """

    name: str
    state: State
    found: str
    action: str = ""


def examine(
    config: StokerConfig, index: Path | None, *, wall: Callable[[], float] = time.time
) -> Iterator[Check]:
    """Yield what was found, in the order in which a start would meet it.

    Args:
        index: Folder of the index to serve; None leaves out what needs one.
        wall: Unix seconds.
    """
    service = config.service
    yield Check("versions", "ok", _versions())
    yield _keys(service)
    yield _connections(service)
    yield _reading(config)
    state_dir: Path | None = None
    if index is None and service.state_dir:
        state_dir = Path(service.state_dir)
    elif index is not None:
        from stoker.service.engine_opening import state_folder

        state_dir = state_folder(index, service)
        yield _direct(config, index)
        yield from _index_and_model(config, index)
    if state_dir is not None:
        yield _state_folder(state_dir)
        yield _disk(state_dir)
        yield _clock(state_dir, wall())
    yield from _broker(service)


def _versions() -> str:
    known = []
    for name in _PACKAGES:
        known.append(f"{name} {importlib.metadata.version(name)}")
    return f"{', '.join(known)}, Python {platform.python_version()}, {platform.platform()}"


def _keys(service: ServiceSettings) -> Check:
    if service.keys_required:
        return Check("keys", "ok", f"requests need a key; {len(service.api_keys)} tenants have one")
    if is_loopback(service.host):
        return Check("keys", "ok", f"none asked for; only this machine reaches {service.host}")
    return Check(
        "keys",
        "warn",
        f"none asked for, and {service.host} is open to the network",
        "set service.api_keys, or see that only trusted callers reach the port",
    )


def _connections(service: ServiceSettings) -> Check:
    from stoker.service.connections import connections_possible

    possible = connections_possible(service.connections_max)
    if possible >= service.connections_max:
        return Check("open files", "ok", f"enough for {possible:,} connections")
    return Check(
        "open files",
        "warn",
        f"enough for {possible:,} connections, service.connections_max is "
        f"{service.connections_max:,}",
        "raise the limit of open files (ulimit -n, LimitNOFILE=)",
    )


def _reading(config: StokerConfig) -> Check:
    from stoker.kernels import _core

    wanted = config.index.io_backend
    try:
        pool = _core.PagePool(page_bytes=4096, budget_bytes=1 << 20, backend=wanted)
    except StokerError as error:
        return Check("page reads", "fail", str(error), "set index.io_backend to automatic")
    if pool.backend == "threads" and wanted == "automatic":
        return Check(
            "page reads",
            "warn",
            "by threads: this kernel, or a filter of system calls, has no io_uring for us",
            "allow io_uring (sysctl kernel.io_uring_disabled=0; a seccomp profile with "
            "io_uring_setup, _enter, _register), or take slower cold reads",
        )
    return Check("page reads", "ok", f"by {pool.backend}; no memory is locked for it")


def _direct(config: StokerConfig, index: Path) -> Check:
    from stoker.kernels import _core

    try:
        file = next(iter(sorted(path for path in index.rglob("*") if path.is_file())), None)
        if file is None:
            return Check("direct reads", "skip", f"no file in {index}")
        pool = _core.PagePool(page_bytes=4096, budget_bytes=1 << 20, direct=config.index.io_direct)
        store = pool.add_store(
            path=str(file), offset_bytes=0, page_count=0, table_offset_bytes=0, table_crc=0
        )
    except (StokerError, OSError) as error:
        return Check("direct reads", "fail", str(error), "give this user the right to read it")
    if pool.direct_io(store):
        return Check("direct reads", "ok", "O_DIRECT works there")
    if not config.index.io_direct:
        return Check("direct reads", "ok", "off: index.io_direct is false")
    return Check(
        "direct reads",
        "warn",
        f"the file system of {index} has no O_DIRECT; its cache will hold pages a second time",
        "put the index on a local ext4 or xfs volume, or leave the cache room beside "
        "index.memory_bytes",
    )


def _index_and_model(config: StokerConfig, index: Path) -> Iterator[Check]:
    from stoker.service.engine_opening import open_index

    # Without writes: a server that runs holds the writer's lock, and nothing is to be made.
    service = dataclasses.replace(config.service, writes="off")
    try:
        opened, _ = open_index(index, dataclasses.replace(config, service=service))
    except StokerError as error:
        yield Check("index", "fail", str(error), f"see `stoker verify {index}`")
        return
    try:
        dim, page_bytes = opened.dim, opened.total_bytes()
        mib = page_bytes / (1 << 20)
        yield Check(
            "index",
            "ok",
            f"{opened.count:,} documents of {dim} dimensions, {mib:,.1f} MiB of pages, "
            f"generation {opened.generation}; `stoker verify` reads the checksums",
        )
    finally:
        opened.close()
    yield _memory(min(page_bytes, config.index.memory_bytes or page_bytes))
    yield _text_model(service, index, dim)


def _memory(pool_bytes: int) -> Check:
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup/memory.max")  # this container's, where groups are of version 2
    with contextlib.suppress(OSError, ValueError):  # no such file; "max"
        limit = min(limit, int(group.read_text()))
    found = f"{pool_bytes / (1 << 20):,.0f} of {limit / (1 << 20):,.0f} MiB may hold pages"
    if pool_bytes <= _MEMORY_RATIO_MAX * limit:
        return Check("memory", "ok", found)
    return Check("memory", "fail", found, "set index.memory_bytes lower; the rest needs room too")


def _text_model(service: ServiceSettings, index: Path, dim: int) -> Check:
    from stoker.service.engine_opening import open_text_model
    from stoker.service.model_record import read_model_record

    name = "text model"
    try:
        model = open_text_model(service, index, dim)
        named = bool(service.embed_model or read_model_record(index))
    except StokerError as error:
        return Check(name, "fail", str(error), "set service.embed_model, or off for vectors alone")
    model.start()
    if not model.wait_loaded(_MODEL_S):
        return Check(name, "fail", f"not loaded within {_MODEL_S:.0f} s")
    if model.state == "on":
        return Check(name, "ok", "loaded, and has the index's dimensions")
    if service.embed_model == "off" or not named:
        return Check(name, "skip", model.state)
    return Check(
        name, "warn", model.state, "set service.embed_model; until then only vectors are searched"
    )


def _state_folder(state_dir: Path) -> Check:
    from stoker.service.engine_opening import lock_state

    name = "state folder"
    own = "set service.state_dir to a folder that can be written"
    if not state_dir.exists():
        parent = _nearest(state_dir)
        if os.access(parent, os.W_OK | os.X_OK):
            return Check(name, "ok", f"{state_dir} is not there yet; {parent} can be written")
        return Check(name, "fail", f"{state_dir} cannot be made: {parent} is read-only to us", own)
    try:
        with tempfile.TemporaryFile(dir=state_dir) as scratch:
            scratch.write(b"stoker")
            scratch.flush()
            os.fsync(scratch.fileno())
    except OSError as error:
        return Check(name, "fail", f"{state_dir}: {error.strerror}", own)
    try:
        os.close(lock_state(state_dir))
    except UnavailableError:
        return Check(name, "warn", f"{state_dir} is in use", "nothing, if that is your server")
    return Check(name, "ok", f"{state_dir} can be written, and no server uses it")


def _disk(state_dir: Path) -> Check:
    free = shutil.disk_usage(_nearest(state_dir)).free
    state: State = "ok"
    if free < _DISK_BYTES_GOOD:
        state = "fail" if free < _DISK_BYTES_MIN else "warn"
    action = "" if state == "ok" else "free some, or set service.event_retention_bytes lower"
    return Check("disk space", state, f"{free / (1 << 20):,.0f} MiB free for {state_dir}", action)


def _clock(state_dir: Path, now_s: float) -> Check:
    """Compare the clock with what was written before: time does not go backwards over restarts."""
    written = [Path(__file__).stat().st_mtime]
    if state_dir.is_dir():
        written += [path.stat().st_mtime for path in state_dir.iterdir() if path.is_file()]
    behind_s = max(written) - now_s
    if behind_s <= 1.0:
        return Check("clock", "ok", "behind nothing that was written before")
    return Check(
        "clock",
        "fail",
        f"{behind_s:,.0f} s behind a file that is there: events would be older than their heat",
        "set the clock (chrony, systemd-timesyncd)",
    )


def _broker(service: ServiceSettings) -> Iterator[Check]:
    if service.event_log != "kafka":
        yield Check("broker", "skip", f"service.event_log is {service.event_log}")
        return
    from stoker.service.heat_topic import HEAT_TOPIC
    from stoker.service.kafka_wiring import open_kafka
    from stoker.service.streams import DEAD_LETTERS_TOPIC

    client = f"service.kafka_client {service.kafka_client}"
    try:
        event_log = open_kafka(service)
    except StokerError as error:
        yield Check("broker", "fail", str(error), "")
        return
    try:
        event_log.check_health()
    except StokerError as error:
        yield Check(
            "broker",
            "fail",
            str(error),
            "check service.kafka_bootstrap, kafka_security_protocol and the credentials; a server "
            "starts all the same, and keeps events in its spool",
        )
        return
    else:
        yield Check("broker", "ok", f"{service.kafka_bootstrap} answers ({client})")
        heat = HEAT_TOPIC if service.heat_topic == "auto" else service.heat_topic
        for name in (service.event_topic, DEAD_LETTERS_TOPIC, *({heat} - {"off"})):
            try:
                count = len(event_log.offsets(name))
            except InputError:
                yield Check(f"topic {name}", "warn", "not there", "none: a server's start makes it")
            except StokerError as error:
                yield Check(f"topic {name}", "fail", str(error), "give this user rights on it")
            else:
                yield _topic(service, name, count)
    finally:
        event_log.close()


def _topic(service: ServiceSettings, name: str, count: int) -> Check:
    wanted = service.event_partitions
    if name == service.event_topic and count != wanted:
        return Check(
            f"topic {name}",
            "fail",
            f"{count} partitions, service.event_partitions is {wanted}",
            f"set service.event_partitions to {count}, or name another service.event_topic",
        )
    return Check(f"topic {name}", "ok", f"{count} partitions")


def _nearest(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that is there."""
    for folder in (path.absolute(), *path.absolute().parents):
        if folder.exists():
            return folder
    return Path("/")
