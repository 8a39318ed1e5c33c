"""The demo's traffic and padding: seeded, skewed, drifting, and honest about what is made up."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import InputError
from stoker.prefetch.events import RESULT_USED, SEARCH_PERFORMED, decode, encode
from stoker.service.padding import exact_top, nearest_rows, pad_neighbours
from stoker.service.traffic import WORDING_COUNT, Questions, Traffic, TrafficSettings

QUESTIONS = Questions()


def unit(rows: int, dim: int, seed: int) -> np.ndarray:
    raw = np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)
    return raw / np.linalg.norm(raw, axis=1, keepdims=True)


def test_the_questions_are_many_distinct_and_linked() -> None:
    texts = [q for topic in QUESTIONS.topics for q in topic.questions]
    assert len(texts) == QUESTIONS.count >= 150
    assert len(set(texts)) == len(texts)
    assert all(text.endswith("?") for text in texts)
    assert len(QUESTIONS.texts) == len(texts) * WORDING_COUNT
    assert QUESTIONS.texts[QUESTIONS.row(1, 2, 0)] == QUESTIONS.topics[1].questions[2]
    for place, topic in enumerate(QUESTIONS.topics):
        assert topic.related
        assert place not in topic.related


def test_one_seed_gives_one_traffic_however_it_is_drawn() -> None:
    whole = Traffic(QUESTIONS, seed=3).draw(500)
    parts = Traffic(QUESTIONS, seed=3)
    assert parts.draw(200) + parts.draw(300) == whole
    assert Traffic(QUESTIONS, seed=4).draw(500) != whole


def test_popularity_is_skewed_and_drifts() -> None:
    visits = Traffic(QUESTIONS, seed=5).draw(12_000)
    early = Counter(visit.topic for visit in visits[:4_000])
    late = Counter(visit.topic for visit in visits[-4_000:])
    for window in (early, late):
        top = sum(count for _, count in window.most_common(10))
        assert 0.35 < top / 4_000 < 0.9
    assert early.most_common(10) != late.most_common(10)
    still = Traffic(QUESTIONS, seed=5, settings=TrafficSettings(drift_sessions=10**9))
    ranked = Counter(visit.topic for visit in still.draw(12_000)).most_common(1)[0][0]
    assert ranked == Counter(visit.topic for visit in still.draw(12_000)).most_common(1)[0][0]


def test_sessions_walk_to_related_topics_and_rephrase() -> None:
    visits = Traffic(QUESTIONS, seed=6).draw(3_000)
    last: dict[str, int] = {}
    moves = rephrased = 0
    for visit in visits:
        before = last.get(visit.session)
        if before is not None and before != visit.topic:
            moves += 1
            assert visit.topic in QUESTIONS.topics[before].related
        last[visit.session] = visit.topic
        rephrased += visit.wording % WORDING_COUNT != 0
    assert moves > 300
    assert rephrased > 300


def test_vectors_are_distinct_unit_and_near_their_question() -> None:
    traffic = Traffic(QUESTIONS, seed=7)
    visits = traffic.draw(400)
    wordings = unit(len(QUESTIONS.texts), 64, seed=1)
    vectors = traffic.vectors(visits, wordings)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    assert len(np.unique(vectors, axis=0)) == 400
    near = np.einsum("ij,ij->i", vectors, wordings[[visit.wording for visit in visits]])
    assert near.min() > 0.85
    np.testing.assert_array_equal(traffic.vectors(visits[100:], wordings), vectors[100:])


def test_each_search_and_each_used_result_is_an_event() -> None:
    traffic = Traffic(QUESTIONS, seed=8)
    used = 0
    ids: set[str] = set()
    for visit in traffic.draw(200):
        text = QUESTIONS.texts[visit.wording]
        events = traffic.events(visit, ["a", "b", "c"], text=text, start_s=1e9, window=200)
        for event in events:
            assert decode(encode(event)).chunk_ids == event.chunk_ids
            assert event.id not in ids
            ids.add(event.id)
        assert events[0].type == SEARCH_PERFORMED
        assert events[0].query == text
        assert 1e9 <= events[0].time_s < 1e9 + 3_600
        if len(events) > 1:
            used += 1
            assert events[1].type == RESULT_USED
            assert events[1].chunk_ids[0] in {"a", "b", "c"}
    assert 100 < used < 200


def test_a_broken_question_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "questions.json"
    path.write_text('{"topics": [{"name": "a", "questions": ["?"], "related": ["nowhere"]}]}')
    with pytest.raises(InputError, match=r"questions\.json: not a file of questions"):
        Questions(path)
    path.write_text('{"topics": [{"name": "a", "questions": [], "related": []}]}')
    with pytest.raises(InputError, match="no questions"):
        Questions(path)


def test_padding_keeps_the_real_rows_and_lies_among_them() -> None:
    real = unit(300, 32, seed=2)
    padded, ids = pad_neighbours(real, 2_000, seed=9)
    assert padded.shape == (2_000, 32)
    assert padded.dtype == np.float32
    np.testing.assert_array_equal(padded[:300], real)
    np.testing.assert_allclose(np.linalg.norm(padded, axis=1), 1, rtol=1e-5)
    assert len(ids) == len(set(ids)) == 1_700
    assert ids[0] == "pad-0"
    again, _ = pad_neighbours(real, 2_000, seed=9)
    np.testing.assert_array_equal(again, padded)
    assert len(np.unique(padded, axis=0)) == 2_000


def test_padding_has_the_neighbour_distances_of_the_real_vectors() -> None:
    # Real vectors lie near a curved sheet of few dimensions; pads must not leave it.
    rng = np.random.default_rng(11)
    raw = np.tanh(rng.normal(size=(2_000, 6)) @ rng.normal(size=(6, 48))).astype(np.float32)
    real = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    padded, _ = pad_neighbours(real[:500], 2_000, seed=3)
    for rank in (1, 10):
        theirs, ours = (1 - np.sort(v @ v.T, axis=1)[:, -1 - rank] for v in (real, padded))
        assert 0.4 < np.median(ours) / np.median(theirs) < 2.5


def test_padding_that_is_not_needed_or_not_possible() -> None:
    real = unit(5, 8, seed=3)
    same, ids = pad_neighbours(real, 5, seed=1)
    assert same is real
    assert ids == []
    with pytest.raises(InputError, match="at least 2"):
        pad_neighbours(real[:1], 10, seed=1)
    twins = np.repeat(real[:1], 3, axis=0)
    assert np.isfinite(pad_neighbours(twins, 50, seed=1)[0]).all()


def test_exact_search_matches_the_obvious_way() -> None:
    vectors, queries = unit(20_000, 16, seed=4), unit(7, 16, seed=5)
    scores = queries @ vectors.T
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :10]
    np.testing.assert_array_equal(exact_top(vectors, queries, 10), expected)
    near = nearest_rows(vectors[:50], 3)
    scores = vectors[:50] @ vectors[:50].T
    np.fill_diagonal(scores, -np.inf)
    for row in range(50):
        assert set(near[row]) == set(np.argsort(-scores[row])[:3])
