"""Changed documents: what rolling back by field saves beside invalidating all of the document.

``python tests/bench/bench_kvcache_rollback.py`` (a minute, with the small model). Documents of six
fields change in one field each: half of the changes say something else (a number, a negation, a
name), half only write it otherwise (case, spaces, units). The table has the fields whose KV goes,
the CPU time to compare and to compute again, and the answers that would come from KV of a text
that says something else.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

from stoker.kvcache import small_model
from stoker.kvcache.field_rollback import compare_fields, rolled_back
from stoker.kvcache.language_model import LanguageModel
from stoker.service.logging import configure_quietly

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kvcache_bench import last_line

Change = tuple[str, str, bool]
"""Field, its text now, whether that says something else."""


def document_of(number: int) -> dict[str, str]:
    return {
        "title": f"Retention of records in pool {'abcdefghij'[number % 10]}",
        "body": f"Records are kept for {3 + number % 9} days. They are not compacted. "
        "Readers go on while segments are removed.",
        "limit": f"At most {2 + number % 7} km of cable between two racks",
        "owner": "written by the storage people in Bern",
        "note": "See the handbook for more about this, and ask before you change it.",
        "steps": "Stop the writer, wait 60 seconds, copy the folder, start the writer.",
    }


def changes_of(document: dict[str, str], number: int) -> list[Change]:
    days, length = 3 + number % 9, 2 + number % 7
    return [
        ("title", document["title"].upper(), False),
        ("body", document["body"].replace(f"{days} days", f"{days + 1} days"), True),
        ("body", document["body"].replace("are not compacted", "are compacted"), True),
        ("body", document["body"].replace(f"{days} days", f"{24 * days} hours"), False),
        ("limit", document["limit"].replace(f"{length} km", f"{length}000 m"), False),
        ("limit", document["limit"].replace("km", "miles"), True),
        ("owner", document["owner"].replace("Bern", "Basel"), True),
        ("steps", document["steps"].replace("60 seconds", "1  minute"), False),
    ]


def measure(documents: int, model: LanguageModel | None) -> list[dict[str, object]]:
    """Return a row for full invalidation and one for rolling back by field."""
    rng = random.Random(3)
    rows = {way: dict.fromkeys(("fields", "wrong", "compare_s", "compute_s"), 0.0)
            for way in ("all", "by field")}  # fmt: skip
    changed = 0
    for number in range(documents):
        before = document_of(number)
        field, text, differs = rng.choice(changes_of(before, number))
        after = {**before, field: text}
        changed += differs
        started = time.process_time()
        gone = rolled_back(compare_fields(before, after))
        rows["by field"]["compare_s"] += time.process_time() - started
        for way, fields in (("all", sorted(after)), ("by field", gone)):
            rows[way]["fields"] += len(fields)
            rows[way]["wrong"] += differs and field not in fields
            if model is not None:
                started = time.process_time()
                for name in fields:
                    model.prefill(model.encode(after[name]))
                rows[way]["compute_s"] += time.process_time() - started
    return [
        {"way": way, "documents": documents, "changed_in_meaning": changed,
         **{key: round(value, 4) for key, value in row.items()}}
        for way, row in rows.items()
    ]  # fmt: skip


def test_by_field_keeps_most_and_is_never_wrong() -> None:
    full, ours = measure(60, None)
    print(full, ours)
    assert full["fields"] == 360
    assert ours["fields"] == ours["changed_in_meaning"]
    assert ours["wrong"] == full["wrong"] == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=60)
    chosen = parser.parse_args()
    configure_quietly()
    table = measure(chosen.documents, LanguageModel(small_model.prepared_small_model()))
    print("\n".join(json.dumps(row) for row in table))
    same = [{k: v for k, v in row.items() if not k.endswith("_s")} for row in table]
    print(last_line(same, "python tests/bench/bench_kvcache_rollback.py"))
