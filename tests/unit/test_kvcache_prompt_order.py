"""The order of passages: never another set, and as long a shared prefix as was seen."""

from __future__ import annotations

import random

import pytest

from stoker.errors import InputError
from stoker.kvcache.prompt_order import PromptOrder


def test_the_longest_shared_prefix_is_taken() -> None:
    order = PromptOrder()
    assert order.arrange(["a", "b", "c"]) == ["a", "b", "c"]
    assert order.arrange(["c", "x", "b", "a"])[:3] == ["a", "b", "c"]
    assert order.arrange(["b", "a"]) == ["a", "b"]
    assert order.arrange(["b", "c"], head="other") == ["b", "c"], "behind another head: nothing"


def test_a_long_passage_outweighs_two_short_ones() -> None:
    order = PromptOrder()
    order.arrange(["a", "b"], tokens={"a": 1, "b": 1})
    order.arrange(["long"], tokens={"long": 10})
    lengths = {"a": 1, "b": 1, "long": 10}
    assert order.arrange(["a", "b", "long"], tokens=lengths)[0] == "long"


def test_any_stream_keeps_its_sets_within_the_bounds() -> None:
    rng = random.Random(3)
    order = PromptOrder(nodes_max=60, passages_max=10)
    for _ in range(500):
        passages = rng.sample(range(25), rng.randint(0, 6))
        assert sorted(map(str, order.arrange(passages))) == sorted(map(str, passages))
        assert order._nodes <= 60
        assert len(order._uses) <= 10


def test_a_passage_twice_is_the_callers_mistake() -> None:
    with pytest.raises(InputError, match="distinct"):
        PromptOrder().arrange(["a", "a"])
    with pytest.raises(InputError):
        PromptOrder(nodes_max=0)
