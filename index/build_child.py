"""Builds a segment in a process of its own, beside one that serves.

Linking and sealing take minutes of processor time and the graph's memory. In the serving process
both would be felt: searches would wait for the interpreter's lock, and its peak memory would not be
the budget that was set. `build_apart` is the serving side, ``python -m stoker.index.build_child``
the other: one JSON request on its standard input, JSON lines back. It ends when that input ends, so
it never outlives who asked.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import structlog
from numpy.typing import NDArray

from stoker.errors import InputError, StokerError, UnavailableError
from stoker.index.generation import NoRoom

_ERRORS: Final[dict[str, type[StokerError]]] = {"NoRoom": NoRoom, "InputError": InputError}


class BuildFailed(UnavailableError):
    """The building process ended without a segment; what it wrote is left to the caller."""


def build_apart(
    path: Path,
    vectors: np.memmap[Any, Any],
    ids: NDArray[Any],
    *,
    metric: str,
    m: int,
    ef_construction: int,
    heat: Mapping[Any, float] | None,
    threads: int | None,
    progress: Callable[[str, int, int], None],
    graph_of: Path | None = None,
) -> None:
    """Have another process build and seal a segment at ``path``; blocks until it has.

    Args:
        path: Folder to make. ``.NAME.request`` is written beside it and removed.
        vectors: A map of a whole file, which the other process maps too.
        ids: int64, or str in an object array.
        metric: As the rest, see `stoker.index.build.build_segment`.
        progress: Called with (what, done, total); what it raises stops the other process.

    Raises:
        OSError: no process could be started.
        NoRoom: the disk is full.
        BuildFailed: it ended in any other way.
    """
    request = path.with_name(f".{path.name}.request")
    facts = {
        "path": str(path),
        "vectors": str(vectors.filename),
        "dtype": vectors.dtype.str,
        "shape": list(vectors.shape),
        "ids": ids.tolist(),
        "metric": metric,
        "m": m,
        "ef_construction": ef_construction,
        "heat": None if heat is None else list(heat.items()),
        "threads": threads,
        "graph_of": None if graph_of is None else str(graph_of),
    }
    try:
        request.write_bytes(orjson.dumps(facts))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stoker.index.build_child", str(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            _follow(path, process, progress)
        finally:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.wait()
    finally:
        request.unlink(missing_ok=True)


def _follow(
    path: Path, process: subprocess.Popen[bytes], progress: Callable[[str, int, int], None]
) -> None:
    """Pass on what the other process says until it is done."""
    assert process.stdout is not None
    for line in process.stdout:
        said = orjson.loads(line)
        if "progress" in said:
            progress(*said["progress"])
        elif "error" in said:
            error = _ERRORS.get(said["error"], BuildFailed)
            raise error(f"{path}: {said['message']}")
        else:
            return
    raise BuildFailed(f"{path}: the building process died with status {process.wait()}")


def _die_with_the_other_side() -> None:
    sys.stdin.buffer.read()  # Nothing comes; it returns when the pipe's other end is gone.
    os._exit(1)


def _say(**facts: Any) -> None:
    sys.stdout.buffer.write(orjson.dumps(facts) + b"\n")
    sys.stdout.buffer.flush()


def _build(request: Path) -> None:
    from stoker.index.build import build_segment

    facts = orjson.loads(request.read_bytes())
    vectors: NDArray[Any] = np.memmap(
        facts["vectors"], dtype=facts["dtype"], mode="r", shape=tuple(facts["shape"])
    )
    build_segment(
        facts["path"],
        vectors,
        facts["ids"],
        metric=facts["metric"],
        m=facts["m"],
        ef_construction=facts["ef_construction"],
        heat=None if facts["heat"] is None else {key: weight for key, weight in facts["heat"]},
        threads=facts["threads"],
        graph_of=facts["graph_of"],
        progress=lambda what, done, total: _say(progress=[what, done, total]),
    )


def main() -> int:
    """Build what the request in the file named by the first argument asks for."""
    # Standard output is the protocol's; the serving side says what was sealed.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(30),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    threading.Thread(target=_die_with_the_other_side, daemon=True).start()
    try:
        _build(Path(sys.argv[1]))
    except OSError as error:
        from stoker.index.generation import storage_error

        ours = storage_error(Path(sys.argv[1]), error)
        _say(error=type(ours).__name__, message=str(ours))
        return 1
    except Exception as error:
        _say(error=type(error).__name__, message=str(error))
        return 1
    _say(done=True)
    return 0


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)
