"""What all tests share: where the repository and the shared data are, and what CI insists on."""

from __future__ import annotations

import os
import platform
from collections.abc import Generator, Iterator
from pathlib import Path

# Before any test module imports torch or numpy: two busy cores and nested thread pools do not mix,
# and nothing may wait for a model hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import structlog

ROOT = Path(__file__).resolve().parent.parent
IN_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}

# The pace of the machine is not under test, so no example has a deadline; a failing example is
# printed with the line that repeats it. CI runs the same examples each time.
hypothesis.settings.register_profile("stoker", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "ci", parent=hypothesis.settings.get_profile("stoker"), derandomize=True, database=None
)
hypothesis.settings.load_profile("ci" if IN_CI else "stoker")


def pytest_report_header() -> str:
    """Say in the first lines what a reader of a log needs to compare two runs."""
    return (
        f"machine: {platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}; "
        f"shared data: {_shared_data_folder() or 'not found'}; CI: {'yes' if IN_CI else 'no'}"
    )


@pytest.fixture(autouse=True)
def logging_as_new() -> Iterator[None]:
    """Give every test structlog unconfigured: commands configure it, and importing the SDK does."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def small_groups() -> Iterator[None]:
    """Have segments of few rows a table of groups of near rows, as large ones have."""
    from stoker.index import range_table, row_groups

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_table, "RANGE_ROWS_MIN", 64)
        patch.setattr(range_table, "_ROWS_MAX", 64)
        patch.setattr(row_groups, "GROUP_ROWS", 32)
        yield


def _shared_data_folder() -> Path | None:
    named = os.environ.get("STOKER_TEST_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of shared data sets beside the checkout, or the one `STOKER_TEST_DATA` names.

    Where it is missing a test skips and says so; in CI it fails instead.
    """
    folder = _shared_data_folder()
    if folder is None:
        message = "no shared data: ../shared/data is missing and STOKER_TEST_DATA is not set"
        if IN_CI:
            pytest.fail(message)
        pytest.skip(message)
    return folder


# Marks of what CI must have, so that a test which lacks it fails there.
_CI_HAS = ("data", "kafka", "apache_kafka", "models")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the skip of a whole file, for a package that is missing, into a failure in CI."""
    report = yield
    if IN_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"CI must run this file: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure in CI where the test is marked with something CI must have."""
    report = yield
    required = [mark for mark in _CI_HAS if item.get_closest_marker(mark)]
    if IN_CI and report.skipped and required and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"CI must run this test (marked {', '.join(required)}): {reason}"
    return report
