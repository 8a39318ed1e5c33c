"""Group keys: what came together is named alike, whatever the order of arrival."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from stoker.errors import InputError
from stoker.kvcache.group_key import GroupKeys

pytest.importorskip("sklearn")
pytestmark = pytest.mark.models

NEAR = np.array([1.0, 0.0, 0.0]), np.array([0.95, 0.1, 0.0]), np.array([0.9, 0.2, 0.1])
ASKED = [
    ("where is my card", NEAR[0], 100.0),
    ("where has my card got to", NEAR[1], 101.5),
    ("my card has not come", NEAR[2], 103.0),
    ("what is the exchange rate", np.array([0.0, 1.0, 0.0]), 102.0),
]


def keys(order: tuple[int, ...]) -> list[str]:
    groups = GroupKeys(window_s=5.0)
    for place in order:
        groups.add(*ASKED[place])
    return [groups.key_of(text, time_s) for text, _, time_s in ASKED]


def test_key_is_the_same_in_every_order() -> None:
    expected = keys((0, 1, 2, 3))
    assert all(keys(order) == expected for order in itertools.permutations(range(4)))
    parts = [dict(part.split(":") for part in key.split("|")) for key in expected]
    assert [part["win"] for part in parts] == ["100"] * 4
    assert len({part["grp"] for part in parts[:3]}) == 1
    assert parts[3]["grp"] == "-"
    assert parts[0]["grp"] == min(part["sig"] for part in parts[:3])
    assert all(len(part["sig"]) == 16 for part in parts)


@pytest.mark.parametrize("since_s", [0.0, 1.0e6, 1.7645e9, 4.1e9])
@pytest.mark.parametrize("window_s", [0.25, 5.0, 60.0])
def test_windows_have_keys_of_their_own_at_any_time(since_s: float, window_s: float) -> None:
    groups = GroupKeys(window_s=window_s)
    begin = since_s // window_s * window_s
    numbers = (0, 1, 2, 7, 60, 999, 86_400)
    starts = [begin + number * window_s for number in numbers]
    told = [groups.key_of("where is my card", start + 0.2 * window_s) for start in starts]
    assert len(set(told)) == len(starts)
    same = [groups.key_of("where is my card", start + 0.8 * window_s) for start in starts]
    assert same == told
    parts = [key.split("|")[0].removeprefix("win:") for key in told]
    assert all(
        abs(float(part) - start) <= window_s for part, start in zip(parts, starts, strict=True)
    )


def test_what_a_full_window_keeps_does_not_depend_on_the_order() -> None:
    kept = set()
    for order in itertools.permutations(range(4)):
        groups = GroupKeys(window_s=5.0, asked_max=3)
        for place in order:
            groups.add(*ASKED[place])
        kept.add(tuple(asked.time_s for asked in groups._window))
    assert kept == {(101.5, 102.0, 103.0)}, "the newest three"


def test_window_slides_and_is_bounded() -> None:
    groups = GroupKeys(window_s=5.0, asked_max=3)
    groups.add(*ASKED[0])
    groups.add("where is my card now", NEAR[1], 106.0)
    assert "grp:-" in groups.key_of(*ASKED[0][::2])
    for number in range(10):
        groups.add(f"question{number}x", NEAR[number % 3], 107.0)
    assert len(groups._window) == 3


def test_clustering_the_linked_part_gives_the_groups_of_the_whole_window() -> None:
    """Chains, pairs and single questions, against the library over all of the window at once."""
    from sklearn.cluster import DBSCAN

    for seed in range(12):
        rng = np.random.default_rng((61, seed))
        centres = rng.standard_normal((6, 5))
        groups = GroupKeys(distance_max=0.1)
        asked = []
        for number in range(40):
            centre = centres[rng.integers(6)] if rng.random() < 0.7 else rng.standard_normal(5)
            asked.append((f"question{number}x", centre + 0.25 * rng.standard_normal(5), 1.0))
            groups.add(*asked[-1])
        unit = np.array([v / np.linalg.norm(v) for _, v, _ in asked], np.float32)
        clusters = DBSCAN(eps=0.1, min_samples=2, metric="cosine").fit_predict(unit)
        named = [groups.key_of(text, 1.0).split("|")[1] for text, _, _ in asked]
        for one in range(40):
            assert (named[one] == "grp:-") == (clusters[one] < 0)
            for other in range(one):
                together = clusters[one] == clusters[other] >= 0
                assert together == (named[one] == named[other] != "grp:-")
        assert groups.group_count(1.0) == clusters.max() + 1
        assert groups.group_count(7.0) == 0, "all of it is over"


def test_wrong_input_is_the_callers() -> None:
    groups = GroupKeys()
    groups.add(*ASKED[0])
    for vector in (np.zeros(3), np.ones(4), np.ones((1, 3)), np.full(3, np.inf)):
        with pytest.raises(InputError):
            groups.add("x", vector, 1.0)
    with pytest.raises(InputError):
        GroupKeys(window_s=0.0)
    for time_s in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="time_s"):
            groups.add("text", np.ones(2), time_s)
