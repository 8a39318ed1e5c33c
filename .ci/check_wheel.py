"""Check what a built wheel holds: all that is needed, and nothing of the checkout besides."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {
    "service": "service",
    "index": "index",
    "prefetch": "prefetch",
    "kvcache": "kvcache",
    "kernels/python": "kernels",
}
FOREIGN = re.compile(
    r"(^|/)(tests|compose|build|\.ci|\.venv|__pycache__)/|\.(cpp|hpp|cu|o|pyc)$|CMakeLists"
)


def check(wheel: Path) -> list[str]:
    """Return what is wrong with ``wheel``, one line each."""
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    wanted = {
        name for name in tracked if re.fullmatch(r"stoker/[^/]+\.(py|typed)|stoker/py\.typed", name)
    }
    for folder, room in ROOMS.items():
        wanted |= {
            f"stoker/{room}/{name.removeprefix(folder + '/')}"
            for name in tracked
            if name.startswith(folder + "/")
        }
    faults = [f"missing: {name}" for name in sorted(wanted - names)]
    if not any(re.fullmatch(r"stoker/kernels/_core\.[^/]*\.(so|pyd)", name) for name in names):
        faults.append("missing: the native core, stoker/kernels/_core.*.so")
    for name in sorted(names - wanted):
        native = name.startswith("stoker/kernels/_core.")
        metadata = re.match(r"stoker-[^/]*\.dist-info/", name)
        if not native and not metadata:
            faults.append(f"stray: {name}")
    faults += [f"foreign: {name}" for name in sorted(names) if FOREIGN.search(name)]
    if not any(name.endswith("licenses/LICENSE") for name in names):
        faults.append("missing: the licence")
    data = [name for name in names if name.endswith((".json", ".yaml"))]
    if not any("openapi" in name for name in data) or not any("schema" in name for name in data):
        faults.append(
            f"missing: the OpenAPI document or the event schemas; there are {sorted(data)}"
        )
    return faults


def main() -> int:
    """Check the wheels that the arguments name; return the exit code."""
    code = 0
    for argument in sys.argv[1:]:
        faults = check(Path(argument))
        for fault in faults:
            print(f"{argument}: {fault}")
        if not faults:
            count = len(zipfile.ZipFile(argument).namelist())
            size = Path(argument).stat().st_size
            print(f"{argument}: {count} files, {size:,} bytes, as it should be")
        code |= bool(faults)
    return code


if __name__ == "__main__":
    sys.exit(main())
