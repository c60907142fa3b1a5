"""Keys and tenants: who is let in, and that nobody sees, changes or counts what is another's, on any route."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx2
import pytest
from starlette.routing import Route

from settings import ServeSettings, Settings, SettingsError
from tests.support.http_servers import HttpServer, bearer, chat_lines, new_key, serving
from tests.support.redis_servers import redis_settings
from tests.support.registry import TestRegistry, ended_job
from worker.registry.api_keys import PREFIX, ApiKeys
from worker.registry.connect import connect
from worker.registry.errors import KeyUnknown
from worker.registry.exchange import text
from worker.registry.keys import Keys
from worker.schemas import SubmitOptions
from worker.serve import access
from worker.serve.app import check_address, make_app
from worker.serve.openapi import OPERATIONS


@pytest.fixture
def server(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    monkeypatch.setattr(access, "WRONG_KEY_DELAY_S", 0.2)
    with serving(redis_url) as server:
        yield server


def _ask(server: HttpServer, method: str, path: str, key: str) -> httpx2.Response:
    return server.http.request(method, path, headers=bearer(key))


def test_no_route_shows_or_touches_what_is_another_tenants(
    server: HttpServer, registry: TestRegistry, redis_url: str
) -> None:
    ours, theirs = new_key(redis_url, "ours"), new_key(redis_url, "theirs")
    file_id = server.upload_id(chat_lines("a", "b"), ours)
    job_id = server.create_id(file_id, ours)
    ended = ended_job(registry, {1: ("b", "internal_error")}, SubmitOptions(tenant="ours"))
    names = {
        "file_id": (file_id, *(f"file-{job}-{kind}" for job in (job_id, ended) for kind in ("output", "error"))),
        "job_id": (job_id, ended),
    }
    before = {key: registry.redis.dump(key) for key in registry.redis.keys("*")}
    num_tried = 0
    # The document has every route of the API, see test_openapi.py; of the pages see test_page.py.
    operations = [*OPERATIONS, *(("HEAD", path) for method, path in OPERATIONS if method == "GET")]
    for method, path in operations:
        for parameter, values in names.items():
            for value in values if f"{{{parameter}}}" in path else ():
                answer = _ask(server, method, path.replace(f"{{{parameter}}}", value), theirs)
                assert answer.status_code == 404, (method, path, value)
                if method != "HEAD":  # the words are those for what there never was
                    unknown = answer.json()["error"]["message"].replace(value, "")
                    assert "ours" not in unknown
                num_tried += 1
    assert num_tried == (2 + 1 + 2) * 5 + (2 + 1 + 1) * 2
    for path in ("/v1/files", "/v1/batches"):
        assert _ask(server, "GET", path, theirs).json()["data"] == []
    for path in (f"/v1/files?after={file_id}", f"/v1/batches?after={job_id}"):
        assert _ask(server, "GET", path, theirs).status_code == 404
    assert server.create(file_id, theirs).json()["error"]["param"] == "input_file_id"
    assert {key: registry.redis.dump(key) for key in registry.redis.keys("*")} == before
    assert [job["id"] for job in _ask(server, "GET", "/v1/batches", ours).json()["data"]] == [ended, job_id]
    assert _ask(server, "GET", f"/v1/files/{file_id}/content", ours).content == chat_lines("a", "b")


def test_a_stranger_who_knows_an_overdue_job_does_not_end_it(
    server: HttpServer, registry: TestRegistry, redis_url: str
) -> None:
    ours, theirs = new_key(redis_url, "ours"), new_key(redis_url, "theirs")
    job_id = server.create_id(server.upload_id(chat_lines("a"), ours), ours)
    registry.expire(job_id)
    before = registry.redis.dump(registry.keys.job(job_id))
    assert _ask(server, "GET", f"/v1/batches/{job_id}", theirs).status_code == 404
    assert registry.redis.dump(registry.keys.job(job_id)) == before
    assert _ask(server, "GET", f"/v1/batches/{job_id}", ours).json()["status"] == "expired"


def test_an_idempotency_key_is_its_tenants_own(server: HttpServer, redis_url: str) -> None:
    keys = [new_key(redis_url, tenant) for tenant in ("a", "b")]
    header = {"Idempotency-Key": "nightly"}
    found = []
    for key in keys:
        files = {"file": ("a.jsonl", chat_lines("x"))}
        headers = {**header, **bearer(key)}
        file = server.http.post("/v1/files", files=files, data={"purpose": "batch"}, headers=headers).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        jobs = {server.http.post("/v1/batches", json=body, headers=headers).json()["id"] for _ in range(2)}
        found += [file, *jobs]
    assert len(set(found)) == len(found) == 4


def test_every_route_wants_a_key_but_those_that_tell_of_nobody(server: HttpServer, redis_url: str) -> None:
    key = new_key(redis_url, "a")
    routes = [route for route in make_app(Settings()).routes if isinstance(route, Route)]
    for route in routes:
        for method in route.methods or ():
            path = route.path.replace("{", "").replace("}", "")
            expected = _without_a_key(method, path)
            answer = _ask(server, method, path, "")
            assert answer.status_code == expected, (method, route.path)
            assert expected != 303 or answer.headers["Location"] == "/sign-in"
            if expected == 401 and method == "GET":
                refused = _ask(server, method, path, key[:-1])
                assert refused.json()["error"]["code"] == "invalid_api_key"
    assert _ask(server, "GET", "/v1/files", key).status_code == 200


def _without_a_key(method: str, path: str) -> int:
    """What is answered: as it is, where nothing is anybody's; a page sends to where one signs in."""
    files = ("/page.css", "/page.js", "/icon.svg")
    if path in ("/healthz", "/openapi.json", "/docs", *files) or (path, method) == ("/sign-in", "GET"):
        return 200
    if path.startswith(("/v1/", "/metrics")):
        return 401
    if (path, method) == ("/sign-in", "HEAD"):
        return 200
    return 403 if method == "POST" else 303  # it comes from no page of this server


def test_a_wrong_key_is_answered_late_and_many_at_once_not_at_all(
    server: HttpServer, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_key(redis_url, "a")
    began_s = time.monotonic()
    assert _ask(server, "GET", "/v1/files", "mr-wrong").status_code == 401
    assert time.monotonic() - began_s >= 0.2
    monkeypatch.setattr(access, "MAX_DELAYED", 0)
    assert _ask(server, "GET", "/v1/files", "mr-wrong").status_code == 429


@pytest.mark.parametrize("header", ["Basic YTpi", "Bearer", "mr-abc"])
def test_a_header_of_another_form_is_refused(server: HttpServer, header: str) -> None:
    assert server.http.get("/v1/files", headers={"Authorization": header}).status_code == 401


def test_redis_holds_no_key_but_its_digest(registry: TestRegistry, redis_url: str) -> None:
    key = new_key(redis_url, "a")
    assert key.startswith(PREFIX)
    assert len(key) == len(PREFIX) + 43  # 256 bits
    stored = {text(name): text(value) for name, value in registry.redis.hgetall(registry.keys.api_keys).items()}
    assert key not in str(stored)
    assert key.removeprefix(PREFIX) not in str(stored)
    assert [len(digest) for digest in stored] == [64]


def test_a_key_of_metrics_reads_nothing_else(server: HttpServer, redis_url: str) -> None:
    key = new_key(redis_url, None)
    assert _ask(server, "GET", "/v1/files", key).status_code == 403
    assert _ask(server, "GET", "/v1/batches", key).json()["error"]["type"] == "permission_error"


def test_a_server_without_keys_is_for_this_machine_and_its_own_pages(server: HttpServer) -> None:
    for headers, status in (
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "jobs.example.com"}, 421),  # a name that somebody has made mean 127.0.0.1
        ({"Host": "["}, 421),
        ({"Origin": "https://example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": server.url}, 200),
    ):
        assert server.http.get("/v1/files", headers=headers).status_code == status, headers


def test_once_the_last_key_is_revoked_an_open_address_lets_nobody_in(redis_url: str, registry: TestRegistry) -> None:
    key = new_key(redis_url, "a")
    with serving(redis_url, host="0.0.0.0") as server:
        assert _ask(server, "GET", "/v1/files", key).status_code == 200
        registry.redis.delete(registry.keys.api_keys)
        assert _ask(server, "GET", "/v1/files", "").status_code == 401


def test_revoking_the_last_key_does_not_open_a_server_of_this_machine(server: HttpServer, redis_url: str) -> None:
    key = new_key(redis_url, "a")
    with connect(redis_settings(redis_url)) as client:
        keys = ApiKeys(client, Keys())
        [entry] = keys.all()
        keys.revoke(entry.id)
        assert keys.all() == []
        with pytest.raises(KeyUnknown):
            keys.revoke("revoked")
    for given in (key, ""):
        assert _ask(server, "GET", "/v1/files", given).status_code == 401
    assert _ask(server, "GET", "/v1/files", new_key(redis_url, "a")).status_code == 200


def test_an_address_that_others_reach_needs_a_key(redis_url: str) -> None:
    settings = Settings(redis=redis_settings(redis_url), serve=ServeSettings(host="0.0.0.0"))
    with pytest.raises(SettingsError, match=r"serve\.host.*millrace keys create"):
        check_address(settings)
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        check_address(settings.model_copy(update={"serve": ServeSettings(host=host)}))
    new_key(redis_url, "a")
    check_address(settings)
