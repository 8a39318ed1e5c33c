"""A process that is out of files, or may not read them: nothing is called damaged for that."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker.errors import CorruptError, UnavailableError
from stoker.index.generation import refuse_unread
from stoker.index.verify import verify

POINTS = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)

# In a process of its own: without files this one could not even report. It prints a line for each
# number of files that were left; by the last of them all goes well.
_CHILD = """
import gc, os, resource, sys
from pathlib import Path

import numpy as np
import stoker
from stoker.index.repair import repair
from stoker.index.verify import verify

act, path = sys.argv[1], Path(sys.argv[2])
query = np.ones(8, np.float32)

def use():
    if act == "verify":
        assert verify(path).whole
    elif act == "repair":
        repair(path)
    else:
        with stoker.open(path, mode="rw" if act == "write" else "r") as index:
            assert index.search(query, 1).ids[0] is not None
            if act == "write":
                index.upsert(["d1"], query[None])

def numbers():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # that of the listing itself
        found.add(int(name))
    return found

use()  # what is imported on first use needs files too
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
at_first = numbers()
for count in range(24):
    limit, left, taken = 0, count, numbers()
    while left or limit in taken:
        left -= limit not in taken
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    said = "ok"
    try:
        use()
    except stoker.UnavailableError:
        said = "unavailable"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(count, said)
gc.collect()
print("left open", sorted(os.readlink(f"/proc/self/fd/{n}") for n in numbers() - at_first))
"""


@pytest.mark.parametrize("act", ["read", "write", "verify", "repair"])
def test_an_index_is_not_damaged_where_files_run_out(tmp_path: Path, act: str) -> None:
    path = tmp_path / "index"
    stoker.build(path, POINTS, [f"d{i}" for i in range(300)], threads=1)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CHILD, act, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    *lines, left_open = done.stdout.splitlines()
    said = [line.partition(" ")[2] for line in lines]
    assert done.returncode == 0, done.stderr
    assert set(said) == {"ok", "unavailable"}, done.stdout
    assert (said[0], said[-1]) == ("unavailable", "ok")
    assert left_open == "left open []"
    assert verify(path).whole


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENOMEM])
def test_what_the_system_refuses_is_no_damage(number: int) -> None:
    outer = CorruptError("cannot be read")
    outer.__cause__ = OSError(number, os.strerror(number), "/x/vectors.stk")
    with pytest.raises(UnavailableError, match=f"/x/vectors.stk: {os.strerror(number)}"):
        refuse_unread(Path("index"), outer)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.EISDIR])
def test_what_the_file_system_has_lost_is_damage(number: int) -> None:
    refuse_unread(Path("index"), OSError(number, os.strerror(number)))
    refuse_unread(Path("index"), CorruptError("a checksum"))
