"""Which embedding model an index was built with: `embedding.json` in the index folder.

Vectors of two models cannot be compared, and a search with the wrong one does not fail, it only
finds nonsense. So whoever embeds for an index writes down the model, and a server uses that one, or
refuses another.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from stoker.errors import CorruptError, UnavailableError
from stoker.index.generation import NewerFormat
from stoker.service.whole_file import replace_file

NAME = "embedding.json"
_VERSION = 1


@dataclass(frozen=True)
class ModelRecord:
    """The model that made an index's vectors.

    Attributes:
        model: As `service.embed_model` spells it.
        fingerprint: `service.embedding.Embedder.fingerprint`.
    """

    model: str
    fingerprint: str


def write_model_record(index_path: Path, record: ModelRecord) -> None:
    """Write the record into an index folder, durably, replacing what is there.

    Raises:
        UnavailableError: it cannot be written.
    """
    path = index_path / NAME
    try:
        replace_file(path, orjson.dumps({"version": _VERSION, **asdict(record)}), b"\n")
    except OSError as error:
        raise UnavailableError(f"{path}: {error.strerror}") from error


def read_model_record(index_path: Path) -> ModelRecord | None:
    """Read the record of an index folder; None where there is none.

    Raises:
        CorruptError: the file is not a record.
        NewerFormat: a newer Stoker wrote it.
        UnavailableError: it cannot be read.
    """
    path = index_path / NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnavailableError(f"{path}: {error.strerror}") from error
    try:
        members = orjson.loads(data)
        version = members["version"]
        if isinstance(version, int) and version > _VERSION:
            raise NewerFormat(path, version, f"version {_VERSION}")
        record = ModelRecord(str(members["model"]), str(members["fingerprint"]))
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise CorruptError(f"{path}: expected the record of an embedding model: {error}") from error
    if version != _VERSION:
        raise CorruptError(f"{path}: expected version {_VERSION}, found {version!r}")
    return record
