"""Files that are replaced as a whole, and what stands on that: the name of a replica."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import structlog

from stoker.errors import CorruptError, UnavailableError
from stoker.service import whole_file
from stoker.service.event_wiring import consumer_group, replica_name
from stoker.service.settings import ServiceSettings
from stoker.service.whole_file import replace_file


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"one")
    replace_file(path, b"two", b" ", b"three")
    assert path.read_bytes() == b"two three"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".file.tmp").write_bytes(b"x" * 100)
    replace_file(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")
    monkeypatch.setattr(whole_file.os, call, full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_replica_keeps_its_name(tmp_path: Path) -> None:
    settings = ServiceSettings()
    name = consumer_group(settings, tmp_path)
    assert name.startswith("stoker-heat-")
    assert consumer_group(settings, tmp_path) == name
    assert consumer_group(ServiceSettings(event_group="mine"), tmp_path) == "mine"


def test_two_replicas_never_share_a_group_because_a_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty name would be a name that all replicas have: each would get a part of the events."""
    settings = ServiceSettings()
    monkeypatch.setattr(whole_file.os, "fsync", full)
    with pytest.raises(UnavailableError, match="replica: No space"):
        consumer_group(settings, tmp_path)
    monkeypatch.undo()
    assert not (tmp_path / "replica").exists()
    (tmp_path / "replica").write_bytes(b"")  # as a crash or an older version may have left it
    name = consumer_group(settings, tmp_path)
    assert len(name) > len("stoker-heat-")
    assert consumer_group(settings, tmp_path) == name


@pytest.mark.parametrize("content", [b"\n", b"\0\0\0\0", b"\xff", b"a b", b"x" * 200])
def test_a_file_that_holds_no_name_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "replica").write_bytes(content)
    with pytest.raises(CorruptError, match="replica: expected the name"):
        consumer_group(ServiceSettings(), tmp_path)


def test_a_copied_state_folder_gets_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a snapshot of a volume: by one name two replicas would put each other out."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    monkeypatch.setattr(platform, "node", lambda: "stoker-0")
    name = replica_name(first)
    shutil.copytree(first, second)  # on the same host
    other = replica_name(second)
    assert other != name
    monkeypatch.setattr(platform, "node", lambda: "stoker-1")  # the same folder of another host
    with structlog.testing.capture_logs() as lines:
        third = replica_name(second)
        assert replica_name(second) == third  # said once, and kept from then on
    assert third not in (name, other)
    assert [(line["event"], line["name_before"], line["place_before"]) for line in lines] == [
        ("service.replica_renamed", other, f"stoker-0:{second}")
    ]
    monkeypatch.setattr(platform, "node", lambda: "stoker-0")
    assert replica_name(first) == name


def test_a_name_without_a_place_is_kept_and_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "replica").write_bytes(b"0123456789ab\n")  # as older versions wrote it
    assert replica_name(tmp_path) == "0123456789ab"
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert replica_name(tmp_path) != "0123456789ab"


def test_a_copy_that_cannot_have_a_new_name_does_not_take_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = replica_name(tmp_path)
    held = (tmp_path / "replica").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(platform, "node", lambda: "another")
        patched.setattr(whole_file.os, "fsync", full)
        with pytest.raises(UnavailableError, match="replica: No space"):
            replica_name(tmp_path)
    assert (tmp_path / "replica").read_bytes() == held
    assert replica_name(tmp_path) == name
