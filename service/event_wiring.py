"""From settings to an event log: the embedded one, or Kafka behind a spool on this disk."""

from __future__ import annotations

import os
import platform
import re
import uuid
from pathlib import Path

import structlog

from stoker.errors import ConfigError, CorruptError, UnavailableError
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.embedded_topic import EmbeddedOptions
from stoker.service.heat_topic import HEAT_TOPIC, heat_topic_spec
from stoker.service.settings import ServiceSettings
from stoker.service.streams import DEAD_LETTERS_TOPIC, EventLog, TopicSpec
from stoker.service.whole_file import replace_file

log = structlog.get_logger(__name__)


def open_event_log(settings: ServiceSettings, state_dir: Path) -> EventLog:
    """Open the log that the settings name, with the topics that a server needs.

    With Kafka, appends go by a spool in the state folder: an event that was acknowledged survives
    a broker that is away, and a server starts without one.

    Raises:
        ConfigError: the topic is there with another number of partitions.
        LogUnavailable: the folder cannot be written.
    """
    event_log: EventLog
    if settings.event_log == "kafka":
        from stoker.service.kafka_wiring import open_kafka
        from stoker.service.spool import SpooledLog

        spool = EmbeddedLog(
            state_dir / "spool", EmbeddedOptions(bytes_max=settings.kafka_spool_bytes_max)
        )
        event_log = SpooledLog(open_kafka(settings), spool, dead_letters_topic=DEAD_LETTERS_TOPIC)
    else:
        event_log = EmbeddedLog(state_dir / "events")
    for name in (DEAD_LETTERS_TOPIC, settings.event_topic):
        event_log.ensure_topic(
            TopicSpec(
                name,
                partition_count=settings.event_partitions if name == settings.event_topic else 1,
                retention_s=settings.event_retention_s,
                retention_bytes=settings.event_retention_bytes,
            )
        )
    return event_log


def heat_topic(settings: ServiceSettings, event_log: EventLog) -> tuple[EventLog, str] | None:
    """Return the log and the topic that the heat is published to, or None for nowhere.

    By `auto` that is Kafka's, where other replicas find it; the embedded log lies beside the
    snapshot, and both would be lost together. Publications pass the spool by: the next one makes
    up for one that was lost.

    Raises:
        ConfigError: the setting cannot be a topic's name, or names another topic of ours.
    """
    name = settings.heat_topic
    if name == "off" or (name == "auto" and settings.event_log != "kafka"):
        return None
    name = HEAT_TOPIC if name == "auto" else heat_topic_spec(name).name
    if name in (settings.event_topic, DEAD_LETTERS_TOPIC):
        raise ConfigError(
            f"service.heat_topic is {name}, where events are; give the heat a topic of its own"
        )
    return _direct(event_log), name


def _direct(event_log: EventLog) -> EventLog:
    from stoker.service.spool import SpooledLog

    return event_log.target if isinstance(event_log, SpooledLog) else event_log


def consumer_group(settings: ServiceSettings, state_dir: Path) -> str:
    """Return the consumer group of this replica's heat.

    A group shares a topic's partitions among its members, but every replica needs the whole heat.
    So each state folder has a name of its own, kept in the file `replica`.

    Raises:
        UnavailableError: the file cannot be read or written.
        CorruptError: it holds something else than a name.
    """
    return settings.event_group or f"stoker-heat-{replica_name(state_dir)}"


def replica_name(state_dir: Path) -> str:
    """Return the name that a state folder's file `replica` keeps, making one where there is none.

    Behind the name stands the place it was made for, as HOST:FOLDER. At another place the folder is
    a copy, and the one it was copied from may run by that name: a new one is drawn. Nothing is
    lost by that, the offsets are in the snapshot. A file without a place gets this one.

    Raises:
        UnavailableError: the file cannot be read or written.
        CorruptError: it holds something else than a name.
    """
    path = state_dir / "replica"
    try:
        here = f"{platform.node()}:{state_dir.resolve()}"
        content = path.read_bytes() if path.exists() else b""
        if not content:
            return _write_name(path, _new_name(), here)
        first, _, rest = content.partition(b"\n")
        name, place = first.strip(), os.fsdecode(rest.removesuffix(b"\n"))
        if not re.fullmatch(rb"[\w.-]{1,100}", name):
            # With a wrong name two replicas could share a group, and each have half of the heat.
            raise CorruptError(
                f"{path}: expected the name of this replica, found {name[:40]!r}; remove the file, "
                "and the replica gets a new name and goes on from its snapshot"
            )
        if place == here:
            return name.decode()
        if not place:  # as older versions wrote it
            return _write_name(path, name.decode(), here)
        new = _write_name(path, _new_name(), here)
    except OSError as error:
        raise UnavailableError(f"{path}: {error.strerror}") from error
    log.warning(
        "service.replica_renamed",
        file=str(path),
        name=new,
        name_before=name.decode(),
        place=here,
        place_before=place,
    )
    return new


def _new_name() -> str:
    return uuid.uuid4().hex[:12]


def _write_name(path: Path, name: str, place: str) -> str:
    replace_file(path, name.encode(), b"\n", os.fsencode(place), b"\n")
    return name
