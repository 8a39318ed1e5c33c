"""Which model an index was built with: kept, read back, and held to."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import ConfigError, CorruptError, UnavailableError
from stoker.index.generation import NewerFormat
from stoker.service import embedding
from stoker.service.engine_opening import open_text_model
from stoker.service.model_record import NAME, ModelRecord, read_model_record, write_model_record
from stoker.service.settings import ServiceSettings


class FakeEmbedder:
    """Names that begin with "no" cannot be had, those with "bad" are no models."""

    def __init__(self, model: str) -> None:
        if model.startswith("no"):
            raise UnavailableError(f"{model} is not installed")
        if model.startswith("bad"):
            raise ConfigError(f"{model} is no model folder")
        self.fingerprint = f"print of {model}"


@pytest.fixture(autouse=True)
def embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "Embedder", FakeEmbedder)


def state(folder: Path, name: str) -> str:
    return open_text_model(ServiceSettings(embed_model=name), folder, 8).state


def record(folder: Path, model: str, fingerprint: str | None = None) -> None:
    write_model_record(folder, ModelRecord(model, fingerprint or f"print of {model}"))


def test_a_record_is_read_back(tmp_path: Path) -> None:
    assert read_model_record(tmp_path) is None
    record(tmp_path, "m")
    record(tmp_path, "m2")
    assert read_model_record(tmp_path) == ModelRecord("m2", "print of m2")
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"version": 1}', b'{"version":0,"model":"m","fingerprint":"f"}']
)
def test_a_damaged_record_is_refused_with_its_path(tmp_path: Path, data: bytes) -> None:
    (tmp_path / NAME).write_bytes(data)
    with pytest.raises(CorruptError, match=NAME):
        read_model_record(tmp_path)
    with pytest.raises(CorruptError):
        state(tmp_path, "m")


@pytest.mark.parametrize("data", [b'{"version":2,"model":"m","fingerprint":"f"}', b'{"version":2}'])
def test_a_record_of_a_newer_version_is_no_damage(tmp_path: Path, data: bytes) -> None:
    (tmp_path / NAME).write_bytes(data)
    for call in (lambda: read_model_record(tmp_path), lambda: state(tmp_path, "m")):
        with pytest.raises(NewerFormat, match=f"{NAME}.*upgrade"):
            call()


def test_a_server_takes_the_indexs_model(tmp_path: Path) -> None:
    assert "names no model" in state(tmp_path, "")
    record(tmp_path, "m")
    assert state(tmp_path, "") == "loading"
    assert state(tmp_path, "m") == "loading"
    assert "embed_model is off" in state(tmp_path, "off")


def test_another_model_is_refused(tmp_path: Path) -> None:
    record(tmp_path, "m")
    with pytest.raises(ConfigError, match="cannot be compared"):
        state(tmp_path, "other")
    # The model changed under its name: nobody asked for it, so text is off and says why.
    record(tmp_path, "m", "an older print")
    assert "cannot be compared" in state(tmp_path, "")


@pytest.mark.parametrize(("name", "refused"), [("none", False), ("bad", True)])
def test_a_model_that_cannot_be_had(tmp_path: Path, name: str, refused: bool) -> None:
    record(tmp_path, name)
    assert state(tmp_path, "").startswith("off: ")
    if refused:  # asked for by name: a mistake in the settings
        with pytest.raises(ConfigError):
            state(tmp_path, name)
    else:
        assert "not installed" in state(tmp_path, name)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=NAME):
        record(tmp_path / "none", "m")
