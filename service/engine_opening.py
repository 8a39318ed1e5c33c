"""Open an engine from a folder and the settings; the one place where the parts are chosen.

The state folder holds what a server learns beside the index:

    lock           held by the one server that uses the folder
    replica        the name of this replica and the place, HOST:FOLDER, that it was made for
    events/        the embedded event log (spool/ in front of Kafka)
    heat.snapshot  the heat and the offsets that it includes, as one
    receipt.json   the last warm-up's receipt
    placement.safetensors   what Q-learning has learnt, where that is on
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import structlog

from stoker.errors import ConfigError, InputError, StokerError, UnavailableError
from stoker.index.collection import Collection
from stoker.kvcache.lookup import LookupReuse
from stoker.service.collection_index import CollectionIndex
from stoker.service.configuration import StokerConfig
from stoker.service.consume import ConsumeOptions
from stoker.service.dead_letters import DeadLetters
from stoker.service.engine import Engine
from stoker.service.engine_parts import Parts
from stoker.service.event_wiring import (
    consumer_group,
    heat_topic,
    open_event_log,
    replica_name,
)
from stoker.service.heat_keeper import HeatKeeper
from stoker.service.kv_parts import KvParts
from stoker.service.metrics import Metrics
from stoker.service.model_record import read_model_record
from stoker.service.placement_wiring import open_placement
from stoker.service.publisher import Publisher
from stoker.service.settings import ServiceSettings
from stoker.service.streams import EventLog
from stoker.service.text_model import TextModel
from stoker.service.whole_file import hold, let_go

log = structlog.get_logger(__name__)

RECEIPT_NAME = "receipt.json"
HEAT_NAME = "heat.snapshot"
_LOCK_NAME = "lock"


def open_engine(
    index_path: str | os.PathLike[str],
    config: StokerConfig,
    *,
    metrics: Metrics | None = None,
) -> Engine:
    """Open everything that a server needs; nothing runs before `Engine.start`.

    Quick by design: the index opens by its upper layers, the heat comes from its snapshot, the
    model loads later. So a cold server answers at once, and says how completely.

    Raises:
        InputError: there is no index in the folder.
        CorruptError: the index, or the state, is damaged; names the file.
        UnavailableError: another process uses the state folder, or writes to the index.
        ConfigError: settings that do not fit this machine or index.
    """
    service = config.service
    path = Path(index_path)
    with contextlib.ExitStack() as undo:
        index, writes_off = open_index(path, config)
        undo.callback(index.close)
        state_dir = state_folder(path, service)
        lock = lock_state(state_dir)
        undo.callback(_unlock_state, state_dir, lock)
        hold(state_dir, state_dir / _LOCK_NAME, lock)
        event_log = open_event_log(service, state_dir)
        undo.callback(event_log.close)
        replica = replica_name(state_dir)  # ours alone by the lock, and by the place that it notes
        heat = _heat_keeper(config, event_log, state_dir, replica)
        publisher = Publisher(
            event_log,
            topic=service.event_topic,
            queue_events_max=service.event_queue_max,
            event_bytes_max=service.event_bytes_max,
            dead_letters=DeadLetters(event_log),
        )
        undo.callback(publisher.close)
        off: dict[str, str] = {}
        if writes_off:
            off["writes"] = writes_off
        reuse = None
        if config.kvcache.reuse_enabled:
            reuse = LookupReuse(config.kvcache)
        else:
            off["reuse"] = "off: kvcache.reuse_enabled is false"
        parts = Parts(
            index=index,
            kv=KvParts(
                config.kvcache,
                read=index.documents,
                index_id=lambda name: int(name) if index.id_kind == "int" else name,
                event_log=event_log,
                replica=replica,
            ),
            text_model=open_text_model(service, path, index.dim),
            reuse=reuse,
            event_log=event_log,
            publisher=publisher,
            heat=heat,
            placement=open_placement(config, index, state_dir, foreseen=heat.expected),
            off=off,
        )
        engine = Engine(
            parts,
            config=config,
            metrics=metrics,
            receipt_path=state_dir / RECEIPT_NAME,
            closed=lambda: _unlock_state(state_dir, lock),
        )
        index.heat_from(engine.demand)
        undo.pop_all()
    log.info(
        "service.engine_opened",
        index=str(path),
        state_dir=str(state_dir),
        documents=index.count,
        generation=index.generation,
        dim=index.dim,
    )
    return engine


def _heat_keeper(
    config: StokerConfig, event_log: EventLog, state_dir: Path, replica: str
) -> HeatKeeper:
    """The heat of all that the event log tells; it reads nothing before it is started."""
    service = config.service
    return HeatKeeper(
        event_log,
        topic=service.event_topic,
        group=consumer_group(service, state_dir),
        snapshot_path=state_dir / HEAT_NAME,
        options=ConsumeOptions(
            snapshot_s=service.snapshot_s,
            dedup_bytes=service.event_dedup_bytes,
            dedup_s=service.event_dedup_s,
            event_bytes_max=service.event_bytes_max,
        ),
        settings=config.prefetch,
        member=replica,
        heat_topic=heat_topic(service, event_log),
        heat_topic_s=service.heat_topic_s,
    )


def state_folder(index_path: Path, settings: ServiceSettings) -> Path:
    """Return where the state of a server over this index is, whether it exists or not."""
    return Path(settings.state_dir) if settings.state_dir else index_path / "state"


def open_text_model(settings: ServiceSettings, index_path: Path, dim: int) -> TextModel:
    """Make the text model of an index; one that cannot be had here is off, and says why.

    Raises:
        ConfigError: the setting names a folder that is no model, or another model than the one
            that the index was built with.
        CorruptError: the bundled model's weights, or the index's record, are not what they were.
    """
    if settings.embed_model == "off":
        return TextModel(None, dim=dim, off="off: service.embed_model is off")
    record = read_model_record(index_path)
    name = settings.embed_model or (record.model if record else "")
    if not name:
        return TextModel(
            None, dim=dim, off="off: service.embed_model is empty and the index names no model"
        )
    from stoker.service.embedding import Embedder

    try:
        embedder = Embedder(name)
    except (UnavailableError, ConfigError) as error:
        if isinstance(error, ConfigError) and settings.embed_model:
            raise
        log.warning("service.text_model_off", reason=str(error))
        return TextModel(None, dim=dim, off=f"off: {error}")
    if record is not None and embedder.fingerprint != record.fingerprint:
        reason = (
            f"{index_path} was built with the model {record.model!r} ({record.fingerprint}), "
            f"service.embed_model is {name!r} ({embedder.fingerprint}); their vectors cannot be "
            "compared"
        )
        if settings.embed_model:
            raise ConfigError(f"{reason}; leave service.embed_model empty, or build the index anew")
        log.warning("service.text_model_off", reason=reason)
        return TextModel(None, dim=dim, off=f"off: {reason}")
    return TextModel(embedder, dim=dim)


def open_index(path: Path, config: StokerConfig) -> tuple[CollectionIndex, str]:
    """Open the index as `service.writes` says; returns why it takes no writes, or ""."""
    writes = config.service.writes
    if writes == "off":
        return CollectionIndex(Collection(path, "r", settings=config.index)), "off: read-only"
    try:
        return CollectionIndex(Collection(path, "rw", settings=config.index)), ""
    except (UnavailableError, InputError) as error:  # another writer; a folder that is read-only
        if writes == "on":
            raise
        try:
            collection = Collection(path, "r", settings=config.index)
        except (StokerError, OSError):
            raise error from None  # the first one says what is wrong with the folder itself
        log.warning("service.writes_off", reason=str(error))
        return CollectionIndex(collection), f"off: {error}"


def lock_state(state_dir: Path) -> int:
    """Make the folder if need be and take its lock; returns the descriptor that holds it."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(state_dir / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UnavailableError(
            f"state folder {state_dir}: {error.strerror}; set service.state_dir to a folder that "
            "can be written"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise UnavailableError(
            f"state folder {state_dir} is in use by another server; stop it, or give this one a "
            "service.state_dir of its own"
        ) from error
    return lock


def _unlock_state(state_dir: Path, lock: int) -> None:
    """Give the folder's lock up."""
    let_go(state_dir)
    os.close(lock)
