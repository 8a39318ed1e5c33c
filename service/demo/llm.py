"""`stoker demo --llm`: time to first token of a small model, with and without a passage's KV."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from stoker.service.demo.options import DemoOptions
from stoker.service.demo.screen import Screen

_TEXTS = 2
_JOINED = 8
_TOKENS_MAX = 512


def show_first_token(options: DemoOptions, screen: Screen) -> dict[str, Any]:
    """Measure on passages of the demo's own corpus and print what was found.

    Raises:
        UnavailableError: torch, transformers or the language model's package is missing.
    """
    from stoker.kvcache.first_token import measure_first_token

    with screen.step("A language model's first token, with and without the passage's KV"):
        lines = (options.folder / "prepared" / "passages.jsonl").read_text(encoding="utf-8")
        passages = [json.loads(line)["text"] for line in lines.splitlines()]
        texts = [
            "\n".join(passages[place * _JOINED : (place + 1) * _JOINED])
            for place in range(min(_TEXTS, len(passages) // _JOINED))
        ] or passages[:1]
        with screen.bar("texts") as report:
            measured = measure_first_token(texts, tokens_max=_TOKENS_MAX, progress=report)
        screen.console.print(measured.render(), highlight=False, markup=False)
    return dataclasses.asdict(measured)
