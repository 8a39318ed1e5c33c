"""Make a heat as servers saved it with ids by name: ``python ... make_heat_file_v1.py FOLDER``.

Two files: `heat-file-v1.snapshot`, version 1 of `service/snapshot_file.py`, and
`heat-publication-v1.json`, head and parts of a heat topic's publication ("heat head 1", base64).
Made by the last code that wrote both, before ids were fingerprints; run it again only to make the
golden files of a *new* version, under new names.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

from make_heat_v2 import golden_events, golden_graph

from stoker.prefetch.heat_parts import split_heat
from stoker.service.snapshot_file import write_snapshot

SAVED_S = 1_760_002_000.0
ABOUT = {"topic": "stoker.events.v1", "offsets": [[0, 60]]}


def text_of(data: bytes) -> str:
    """Return bytes as JSON takes them."""
    return base64.b64encode(data).decode()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    body = golden_graph().to_snapshot()
    seen = [(event.tenant, event.id) for event in golden_events()[-20:]]
    header = {**ABOUT, "group": "g", "seen": [list(pair) for pair in seen], "time_s": SAVED_S}
    write_snapshot(folder / "heat-file-v1.snapshot", header, body)
    head, parts = split_heat(body, seen, ABOUT)
    published = {"head": text_of(head), "parts": {n: text_of(data) for n, data in parts.items()}}
    (folder / "heat-publication-v1.json").write_text(json.dumps(published, indent=0) + "\n")
