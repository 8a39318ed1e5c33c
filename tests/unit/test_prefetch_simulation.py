"""Reading traces, and running policies over them from the command line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import structlog

from stoker.errors import InputError, UnavailableError
from stoker.prefetch import simulation
from stoker.prefetch.events import SEARCH_PERFORMED, encode, new_event
from stoker.prefetch.references import next_accesses, reference
from stoker.prefetch.simulation import measured_mask, parse_capacities, parse_policies, simulate
from stoker.prefetch.traces import Trace, read_trace
from stoker.service.cli import main
from stoker.service.commands import simulate as simulate_command


def ragpulse_row(time_s: int, session: str, passages: list[int]) -> str:
    return json.dumps(
        {
            "timestamp": str(time_s),
            "hash_ids": {"passages_ids": passages, "history": []},
            "session_id": session,
        }
    )


def test_ragpulse_is_sorted_by_time_and_keeps_sessions(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([ragpulse_row(9, "b", [7]), ragpulse_row(3, "a", [5, 7])]) + "\n\n")
    trace = read_trace(path, "ragpulse")
    assert trace.keys.tolist() == [0, 1, 1]
    assert trace.times_s is not None
    assert trace.times_s.tolist() == [3.0, 3.0, 9.0]
    assert trace.sessions is not None
    assert trace.sessions.tolist() == [0, 0, 1]
    assert trace.requests.tolist() == [0, 0, 1]


def test_mooncake_times_are_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1500, "hash_ids": [4, 9]}\n')
    trace = read_trace(path, "mooncake")
    assert trace.times_s is not None
    assert trace.times_s.tolist() == [1.5, 1.5]
    assert trace.sessions is None


def test_events_are_keyed_by_tenant_and_chunk(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl.gz"
    lines = [
        encode(
            new_event(
                SEARCH_PERFORMED,
                tenant=tenant,
                chunk_ids=("c1", "c2"),
                session="s",
                time_s=1_760_000_000.0,
            )
        )
        for tenant in ("x", "y")
    ]
    path.write_bytes(gzip.compress(b"\n".join(lines)))
    trace = read_trace(path, "events")
    assert trace.footprint == 4
    assert len(set(trace.sessions.tolist())) == 2  # type: ignore[union-attr]


def test_integers_and_lines(tmp_path: Path) -> None:
    values = np.array([30, 10, 30, 20])
    for dtype, name in ((">i4", "int32be"), (">i8", "int64be")):
        path = tmp_path / f"{name}.xz"
        path.write_bytes(lzma.compress(values.astype(dtype).tobytes()))
        assert read_trace(path, name).keys.tolist() == [0, 1, 0, 2]
    path = tmp_path / "keys.gz"
    path.write_bytes(gzip.compress(b"30\n10\n*\n\n30\n20\n"))
    assert read_trace(path, "lines").keys.tolist() == [0, 1, 0, 2]


def passages(ids: bytes, *, time: bytes = b'"1"') -> bytes:
    """A line in the format of RAGPulse, of which a part may be wrong."""
    return (
        b'{"timestamp": ' + time + b', "session_id": "s", "hash_ids": {"passages_ids": ' + ids
    ) + b"}}\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("lines", b"", "no accesses"),
        ("lines", b"\x1f\x8bbroken", "damaged"),
        ("lines", gzip.compress(b"1\n2\n" * 999)[:-9], "damaged"),
        ("int32be", b"12345", "whole number"),
        ("lines", b"\xef\xbb\xbf", "no accesses"),
        ("ragpulse", b'{"timestamp": "1"}\n', "line 1.*'session_id' is missing"),
        ("ragpulse", b"[1]\n", "line 1: not a RAGPulse request"),
        ("ragpulse", passages(b"null"), "no accesses"),
        ("ragpulse", passages(b'{"a": 1}'), "line 1.*expected a list, found dict"),
        ("ragpulse", passages(b'"abc"'), "line 1.*expected a list, found str"),
        ("ragpulse", passages(b"[1, [2]]"), "line 1.*numbers or names, found list"),
        ("ragpulse", passages(b"[1, true]"), "line 1.*numbers or names, found bool"),
        ("ragpulse", passages(b"[1]", time=b'"NaN"'), "line 1: timestamp nan is no time"),
        ("ragpulse", passages(b"[1]", time=b'"inf"'), "line 1: timestamp inf is no time"),
        ("ragpulse", passages(b"[1]", time=b"null"), "line 1"),
        ("ragpulse", passages(b"[1]") + b"\n{broken\n", "line 3: not JSON"),
        ("mooncake", b"{}\n{", "line 1: .*'timestamp' is missing"),
        ("mooncake", passages(b"[1]"), "line 1.*expected a list, found dict"),
        ("events", b'{"specversion": "2"}\n', "line 1"),
        ("ragpulse", b"[1, 2]\n", "line 1: not a RAGPulse request: expected an object, found list"),
        ("mooncake", b"7\n", "line 1: not a Mooncake request: expected an object, found int"),
        ("int32be", bz2.compress(bytes(400)), "packed with bzip2, which is not read"),
        ("lines", b"\x28\xb5\x2f\xfd" + bytes(60), "packed with zstd, which is not read"),
        ("int64be", b"PK\x03\x04" + bytes(60), "packed with zip, which is not read"),
        ("nothing", b"", "expected one of"),
    ],
)
def test_bad_traces_say_where(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_trace(path, name)
    with pytest.raises(InputError, match="cannot read"):
        read_trace(tmp_path / "missing", "lines")


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_damaged_compressed_traces_never_surprise(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    """Cut anywhere, or with one bit turned: read as it was, or refused."""
    rng = np.random.default_rng(3)
    whole = b"".join(b"%d\n" % key for key in rng.integers(0, 500, 800))
    packed = pack(whole)
    path = tmp_path / "trace"
    path.write_bytes(packed)
    expected = read_trace(path, "lines").keys.tolist()
    refused = []
    for turn in range(150):
        data = bytearray(packed)
        at = int(rng.integers(6, len(data)))
        if turn % 2:
            data[at] ^= 1 << int(rng.integers(8))
        else:
            del data[at:]
        path.write_bytes(data)
        try:
            assert read_trace(path, "lines").keys.tolist() == expected
        except InputError as error:
            refused.append(str(error))
    assert len(refused) > 75
    assert all("damaged compressed data" in reason for reason in refused)


def test_a_byte_order_mark_and_windows_lines_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xef\xbb\xbf1\r\n2\r\n1")
    assert read_trace(path, "lines").keys.tolist() == [0, 1, 0]
    path.write_bytes(b"\xef\xbb\xbf" + ragpulse_row(3, "a", [5, 7]).encode())
    assert read_trace(path, "ragpulse").footprint == 2


def test_requests_without_a_session_have_none(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    rows = [ragpulse_row(3, "a", [5]), ragpulse_row(1, "b", [6, 5])]
    path.write_text("\n".join([*rows, rows[0].replace('"a"', "null")]))
    trace = read_trace(path, "ragpulse")
    assert trace.keys.tolist() == [0, 1, 1, 1]
    assert trace.sessions is not None
    assert trace.sessions.tolist() == [0, 0, 1, -1]
    path.write_text(rows[0].replace('"a"', "null"))
    assert read_trace(path, "ragpulse").sessions is None


def key_trace(keys: list[int]) -> Trace:
    array = np.array(keys, dtype=np.int64)
    return Trace(array, None, None, np.arange(len(array)), int(array.max()) + 1)


def test_next_accesses() -> None:
    following = next_accesses(np.array([5, 6, 5, 5]))
    assert following[:2].tolist()[0] == 2
    assert following[2] == 3
    assert following[1] == following[3] > 1 << 50


def test_belady_is_the_upper_bound_and_share_is_of_it() -> None:
    rng = np.random.default_rng(8)
    trace = key_trace((rng.zipf(1.3, 4000) % 400).tolist())
    outcomes = simulate(
        trace,
        policies=parse_policies("all"),
        capacities=[20, 80],
        measured=measured_mask(trace, "25%"),
    )
    assert [o.policy for o in outcomes[:2]] == ["stoker", "lru"]
    for outcome in outcomes:
        assert outcome.accesses == 3000
        assert outcome.hits + outcome.loads_demand == 3000
        assert outcome.belady_share is not None
        assert 0.0 < outcome.belady_share <= 1.0 + 1e-9
        assert outcome.bytes_demand == outcome.loads_demand * 4096


def test_lfu_decay_and_area_are_ours() -> None:
    keys = np.array([1, 2, 1, 3, 1, 4, 1], dtype=np.int64)
    assert reference("lfu-decay", 2).run(keys).tolist()[2::2] == [True, True, True]
    assert reference("area", 5).run(keys).sum() >= 3


@pytest.mark.parametrize("capacity", [1, 2, 5, 6, 9, 10, 19, 20, 400, 1 << 40])
def test_every_policy_takes_any_room(capacity: int) -> None:
    """A child process would be needed to see it fail: the library ends the process it is in."""
    rng = np.random.default_rng(8)
    trace = key_trace((rng.zipf(1.3, 800) % 60).tolist())
    outcomes = simulate(
        trace,
        policies=parse_policies("all"),
        capacities=[capacity],
        measured=measured_mask(trace, None),
    )
    assert min(outcome.hit_ratio for outcome in outcomes) > 0.0
    if capacity >= 60:
        assert {outcome.hits for outcome in outcomes} == {800 - trace.footprint}


@pytest.mark.parametrize("names", ["all", "stoker,lru"])
def test_a_missing_library_is_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    monkeypatch.setitem(sys.modules, "libcachesim", None)
    monkeypatch.setattr(simulation, "run_stoker", None)  # would fail if it were called
    trace = key_trace([0, 1, 0, 1] * 9)
    with pytest.raises(UnavailableError, match="pip install libcachesim"):
        simulate(
            trace,
            policies=parse_policies(names),
            capacities=[30],
            measured=measured_mask(trace, None),
        )


def test_capacities_policies_and_warm_until() -> None:
    assert parse_capacities("100, 5%", 400) == [100, 20]
    assert parse_capacities("0.01%", 400) == [1]
    for bad in ("0", "x", "-5%", "", "1.5", "nan%", "9" * 20, "10,"):
        with pytest.raises(InputError):
            parse_capacities(bad, 400)
    assert parse_policies("stoker,lru,lru") == ["stoker", "lru"]
    assert parse_policies("all")[-1] == "belady"
    with pytest.raises(InputError, match="expected one of"):
        parse_policies("best")
    trace = key_trace([0, 1, 0, 1])
    assert measured_mask(trace, None).all()
    assert measured_mask(trace, "3").tolist() == [False, False, False, True]
    timed = Trace(trace.keys, np.array([0.0, 60.0, 120.0, 7200.0]), None, trace.requests, 2)
    assert measured_mask(timed, "2h").tolist() == [False, False, False, True]
    assert measured_mask(timed, "60").tolist() == [False, True, True, True]
    assert measured_mask(trace, "50%").tolist() == [False, False, True, True]
    for bad in ("2h", "soon", "x%", "", "nan", "inf", "nan%", "-5", "-1%"):
        with pytest.raises(InputError):
            measured_mask(trace, bad)
    with pytest.raises(InputError, match="no access is left"):
        simulate(trace, policies=["stoker"], capacities=[1], measured=measured_mask(trace, "9"))


def test_every_policy_that_is_named_can_be_asked_for() -> None:
    """What the command's help and `reference` name, `--policy` takes, and the other way round."""
    text = simulate_command._EXAMPLES.partition("policies: ")[2].partition(", and others of")[0]
    named = [name.strip() for name in re.sub(r" \(.*?\)", "", text).split(",")]
    assert {"stoker", "belady", "qlearning", "entropy-lru-k", "entropy-regime"} <= set(named)
    assert parse_policies(",".join(named)) == named
    with pytest.raises(InputError) as refused:
        parse_policies("best")
    listed = str(refused.value).partition("expected one of ")[2].split(", ")
    assert set(named) <= set(listed)


@pytest.fixture
def _logging_restored() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("_logging_restored")
def test_command_prints_json_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [ragpulse_row(10 * i, f"s{i // 3}", [i % 5, (i + 1) % 5, 9]) for i in range(60)]
    path.write_text("\n".join(rows))
    arguments = ["simulate", "--trace", str(path), "--format", "ragpulse", "--capacity", "3"]
    assert main([*arguments, "--policy", "stoker,lru,belady", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["accesses"] == 180
    assert [r["policy"] for r in result["results"]] == ["stoker", "lru", "belady"]
    # What reads this output relies on these names.
    assert set(result) == {"trace", "accesses", "footprint", "requests", "results"}
    assert set(result["results"][0]) == {
        "policy",
        "capacity",
        "accesses",
        "hits",
        "loads_demand",
        "loads_ahead",
        "hit_ratio",
        "belady_share",
        "bytes_demand",
        "bytes_ahead",
        "prefetch",
        "switches",
        "seconds",
    }
    ends = {"issued", "useful", "late", "unused", "polluting", "pending"}
    assert set(result["results"][0]["prefetch"]) == ends
    assert main([*arguments, "--policy", "stoker"]) == 0
    assert "Belady" in capsys.readouterr().out
    assert main([*arguments[:-1], "none"]) == 3
    assert main(["simulate", "--trace", "x"]) == 2
    # What would be passed over is refused: an empty name, and flags that only others read.
    capsys.readouterr()
    for more, told in (
        (["--policy", ""], "policy ''"),
        (["--explain", "0"], "--tiers"),
        (["--explain", ""], "--tiers"),
    ):
        assert main([*arguments, *more]) == 3
        assert told in capsys.readouterr().err
    assert main(["simulate", "--made", "drift:1", "--format", "lines", "--capacity", "3"]) == 3
    assert "--format" in capsys.readouterr().err
