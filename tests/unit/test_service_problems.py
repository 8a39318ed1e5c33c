"""The one table: every error class has one HTTP answer, and comes back as the same branch."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml

from stoker import errors
from stoker.errors import (
    CapacityError,
    ConfigError,
    CorruptError,
    InputError,
    StokerError,
    UnavailableError,
)
from stoker.service import problems
from stoker.service.problems import (
    PROBLEMS,
    FeatureOff,
    NotReady,
    Problem,
    RequestError,
    ServerFault,
    ServiceError,
    TooManyRequests,
    error_of,
    problem_of,
)

FIVE = (ConfigError, InputError, CapacityError, UnavailableError, CorruptError)


def all_errors() -> list[type[StokerError]]:
    # Whatever other tests have imported: each module that grows one. Some need an extra.
    for path in sorted((Path(__file__).resolve().parents[2] / "stoker").glob("*/*.py")):
        if re.search(r"^class \w+\([^)]*Error[,)]", path.read_text(), re.MULTILINE):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(f"stoker.{path.parent.name}.{path.stem}")
    found: list[type[StokerError]] = []
    waiting = [StokerError]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        found.append(cls)
    return found


@pytest.mark.parametrize("cls", all_errors(), ids=lambda cls: cls.__name__)
def test_every_error_has_an_answer_of_its_branch(cls: type[StokerError]) -> None:
    row = next(row for row in PROBLEMS if issubclass(cls, row.error))
    assert 400 <= row.status <= 599
    if issubclass(cls, InputError):
        assert row.status < 500
    for branch in FIVE:
        if issubclass(cls, branch) and cls not in (ServerFault,):
            assert issubclass(row.client, branch)


def test_no_row_hides_behind_an_earlier_one() -> None:
    for i, row in enumerate(PROBLEMS):
        assert not any(issubclass(row.error, before.error) for before in PROBLEMS[:i]), row.kind
    assert len({row.kind for row in PROBLEMS}) == len(PROBLEMS)
    assert all(row.action for row in PROBLEMS)


def test_a_document_says_what_where_and_what_to_do() -> None:
    problem = problem_of(RequestError("k: expected 1 to 5, found 9", where="/k"), "r-1")
    assert problem.to_dict() == {
        "type": "urn:stoker:problem:bad-input",
        "title": "The request cannot be taken as it is",
        "status": 400,
        "detail": "k: expected 1 to 5, found 9",
        "where": "/k",
        "action": "correct the field that is named; /openapi.json has its schema",
        "retriable": False,
        "request_id": "r-1",
    }
    assert problem_of(RequestError("x", action="do this")).action == "do this"


def test_an_unexpected_error_keeps_its_text_to_itself() -> None:
    problem = problem_of(RuntimeError("/srv/secret/path"), "r-2")
    assert (problem.status, problem.kind) == (500, "server-fault")
    assert "secret" not in str(problem.to_dict())
    assert "RuntimeError" in problem.detail


@pytest.mark.parametrize("row", PROBLEMS, ids=lambda row: row.kind)
def test_an_error_comes_back_from_its_document(row: problems.ProblemRow) -> None:
    sent = Problem(row.kind, row.title, row.status, "detail", "here", "do", True, "r-3")
    error = error_of(Problem.from_dict(sent.to_dict(), row.status))
    assert type(error) is row.client
    assert (str(error), error.where, error.action) == ("detail", "here", "do")
    assert error.problem == sent


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        (400, RequestError),
        (418, RequestError),
        (429, TooManyRequests),
        (503, NotReady),
        (500, ServiceError),
        (599, ServerFault),
    ],
)
def test_an_unknown_kind_is_judged_by_its_status(status: int, cls: type[ServiceError]) -> None:
    error = error_of(Problem.from_dict({"type": "https://example.org/x"}, status))
    assert isinstance(error, cls)
    assert str(error)


def test_what_is_off_is_not_worth_a_retry() -> None:
    assert not problem_of(FeatureOff("x")).retriable
    assert problem_of(TooManyRequests("x")).retriable


def test_the_api_document_lists_every_kind() -> None:
    text = Path(problems.__file__).with_name("openapi.yaml").read_text()
    kinds = yaml.safe_load(text)["components"]["schemas"]["Problem"]["properties"]["type"]["enum"]
    assert set(kinds) == {f"urn:stoker:problem:{row.kind}" for row in PROBLEMS}


def test_the_five_branches_are_all_in_the_table() -> None:
    listed = {row.error for row in PROBLEMS}
    branches = {
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, StokerError) and cls is not StokerError
    }
    assert branches <= listed
