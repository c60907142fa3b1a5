"""The OpenAPI document: it has every route, and whatever is drawn from it is answered as it says, never by a 500."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jsonschema
import pytest
import schemathesis
from hypothesis import strategies
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from settings import Settings
from tests.support.http_servers import HttpServer, chat_lines, serving
from tests.support.registry import TestRegistry, ended_job
from worker.serve.app import make_app
from worker.serve.openapi import OPERATIONS, document

HELD_TO = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OF_NO_API = {"/openapi.json", "/docs", "/page.css", "/page.js", "/icon.svg", "/", "/events", "/sign-in", "/sign-out"}

EXAMPLES, MORE_EXAMPLES = 12, 400


@pytest.fixture
def server(redis_url: str) -> Iterator[HttpServer]:
    with serving(redis_url) as server:
        yield server


def test_the_document_has_every_route_and_no_other() -> None:
    routes = [route for route in make_app(Settings()).routes if isinstance(route, Route)]
    there = {
        (method, route.path.replace(":path", ""))
        for route in routes
        if route.path not in OF_NO_API and not route.path.startswith("/jobs")
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert there == OPERATIONS.keys()


def test_the_document_is_one_of_openapi(server: HttpServer) -> None:
    found = server.http.get("/openapi.json").json()
    assert found == document()
    assert found["openapi"] == "3.1.0"
    for schema in found["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = [operation["operationId"] for path in found["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names) == len(OPERATIONS)


def test_the_page_of_the_document_has_every_request_and_nothing_foreign(server: HttpServer) -> None:
    answer = server.http.get("/docs")
    for method, path in OPERATIONS:
        assert f"<code>{method} {path}</code>" in answer.text
    assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
    assert "//" not in answer.text.replace("https://json-schema.org", "").replace("://spec.openapis.org", "")
    assert server.http.get("/page.css").headers["Content-Type"].startswith("text/css")


def _names(server: HttpServer, registry: TestRegistry) -> dict[str, Callable[[], str]]:
    """What makes something that is there, by the parameter of a path that names it."""
    kinds = itertools.cycle(("input", "output", "error"))

    def job_id() -> str:
        if next(kinds) == "input":
            return server.create_id(server.upload_id(chat_lines("a")))
        return ended_job(registry, {1: ("b", "internal_error")})

    def file_id() -> str:
        kind = next(kinds)
        return server.upload_id(chat_lines("a")) if kind == "input" else f"file-{job_id()}-{kind}"

    return {"job_id": job_id, "file_id": file_id, "input_file_id": file_id}


def _hold_to_the_document(server: HttpServer, registry: TestRegistry, operation: Any, num_examples: int) -> set[int]:
    """Statuses that were answered."""
    names, seen = _names(server, registry), set()

    @hypothesis.settings(
        max_examples=num_examples, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(), is_there=strategies.booleans())
    def hold(case: Any, is_there: bool) -> None:
        for name in (names.keys() & set(case.path_parameters or {})) if is_there else ():
            case.path_parameters[name] = names[name]()
        if is_there and isinstance(case.body, dict) and "input_file_id" in case.body:
            case.body |= {"input_file_id": names["input_file_id"](), "completion_window": "24h", "metadata": None}
        answer = case.call(base_url=server.url, timeout=30)
        case.validate_response(answer, checks=HELD_TO)
        seen.add(answer.status_code)

    hold()
    return seen


OPERATION_NAMES = [operation.name for operation in OPERATIONS.values()]


def _operation(name: str) -> Any:
    schema: Any = schemathesis.openapi.from_dict(document())
    return next(found.ok() for found in schema.get_all_operations() if found.ok().definition.raw["operationId"] == name)


@pytest.mark.parametrize("name", OPERATION_NAMES)
def test_what_is_drawn_from_the_document_is_answered_as_it_says(
    server: HttpServer, registry: TestRegistry, name: str
) -> None:
    seen = _hold_to_the_document(server, registry, _operation(name), EXAMPLES)
    assert 200 in seen or name == "retrieve_model"  # there is none
    assert 500 not in seen


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATION_NAMES)
def test_many_requests_drawn_from_the_document_are_answered_as_it_says(
    server: HttpServer, registry: TestRegistry, name: str
) -> None:
    _hold_to_the_document(server, registry, _operation(name), MORE_EXAMPLES)
