"""The pages that people read: links lead somewhere, commands exist, and the first example runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [ROOT / name for name in listed.splitlines() if not (ROOT / name).is_symlink()]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as repository hosts make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_links_lead_somewhere() -> None:
    broken = []
    for page in pages():
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not file.exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                broken.append(f"{page.relative_to(ROOT)}: {target}: no such heading")
    assert not broken, "\n".join(broken)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_make_targets_that_pages_name_exist() -> None:
    named = {
        name
        for page in pages()
        for block in re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), flags=re.DOTALL)
        for name in re.findall(r"(?:^|[\s`])make ([a-z][a-z-]+)(?![\w=])", block)
    }
    assert {"demo", "test"} <= named
    assert named <= targets()


def test_every_target_is_phony_and_listed() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: (.+)$", text, flags=re.MULTILINE))
    assert targets() == phony
    helped = subprocess.run(
        ["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in ("demo", "test", "bench", "lint", "sanitize", "wheel", "clean"):
        assert f"make {name}" in helped


def test_the_first_example_runs_as_written(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) <= 10, "a first example is read in one look"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", example],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"\[\s*42\b", done.stdout), f"the vector itself is nearest: {done.stdout}"


@pytest.mark.parametrize("name", ["run", "step", "test", "try-wheel"])
def test_scripts_parse(name: str) -> None:
    script = ROOT / ".ci" / name
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_a_step_says_what_it_does_and_keeps_the_exit_code(tmp_path: Path) -> None:
    step = [str(ROOT / ".ci" / "step"), str(tmp_path / "log"), "a thing that fails"]
    done = subprocess.run(
        [*step, "bash", "-c", "echo the reason; exit 7"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7
    assert done.stdout.startswith("== a thing that fails")
    assert "the reason" in done.stderr
    fine = subprocess.run([*step, "true"], capture_output=True, text=True, check=True)
    assert "done in" in fine.stdout
