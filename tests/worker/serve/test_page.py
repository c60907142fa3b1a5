"""The pages: what they show and escape, who may see them and what may be sent to them, without a browser."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator

import httpx2
import pytest
import redis

from tests.support.http_servers import HttpServer, bearer, chat_lines, new_key, serving
from tests.support.processes import running_thread, wait_until
from tests.support.registry import TestRegistry, ended_job
from worker.registry.files import FileStore
from worker.registry.models import Announcement, Heartbeats, ModelDirectory
from worker.schemas import EngineLoad, SubmitOptions, WorkerInfo
from worker.serve import access, live

FOREIGN_LINK = re.compile(r'(src|href|action)="(?!/(?!/)|#)')
EVIL = "<script>alert(1)</script>\"'&"


@pytest.fixture
def server(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    monkeypatch.setattr(access, "WRONG_KEY_DELAY_S", 0.05)
    monkeypatch.setattr(live, "EVERY_S", 0.05)
    with serving(redis_url) as server:
        yield server


def _post(server: HttpServer, path: str, *, cookie: str = "", **given: object) -> httpx2.Response:
    headers = {"Origin": server.url, **({"Cookie": f"millrace_key={cookie}"} if cookie else {})}
    return server.http.post(path, headers=headers, **given)  # type: ignore[arg-type]


def _get(server: HttpServer, path: str, cookie: str = "") -> httpx2.Response:
    return server.http.get(path, headers={"Cookie": f"millrace_key={cookie}"} if cookie else {})


def _submit(server: HttpServer, name: str, *, cookie: str = "", **fields: str) -> str:
    answer = _post(
        server, "/jobs", cookie=cookie, files={"file": (name, chat_lines("a", "b"))},
        data={"purpose": "batch", **fields},
    )  # fmt: skip
    assert answer.status_code == 303, answer.text
    return answer.headers["Location"].removeprefix("/jobs/")


def test_a_file_is_submitted_shown_and_cancelled_and_is_kept_nowhere_else(server: HttpServer) -> None:
    job_id = _submit(server, "tickets.jsonl", model="fake")
    page = _get(server, "/").text
    assert "tickets.jsonl" in page
    assert f'href="/jobs/{job_id}"' in page
    assert "0 of 2" in page
    assert server.http.get("/v1/files").json()["data"] == []
    about = server.http.get(f"/v1/batches/{job_id}").json()
    assert (about["metadata"], about["model"]) == ({"file": "tickets.jsonl"}, "fake")
    assert _post(server, f"/jobs/{job_id}/cancel").headers["Location"] == f"/jobs/{job_id}"
    page = _get(server, f"/jobs/{job_id}").text
    assert "cancelled" in page
    assert "batch_cancelled" in page
    assert _post(server, f"/jobs/{job_id}/cancel").status_code == 303  # a second time
    assert _post(server, f"/jobs/{job_id}/delete").headers["Location"] == "/"
    assert _get(server, f"/jobs/{job_id}").status_code == 404


def test_errors_by_code_are_shown_and_what_failed_is_retried(server: HttpServer, registry: TestRegistry) -> None:
    job_id = ended_job(registry, {1: ("b", "internal_error"), 2: ("c", "internal_error"), 3: ("d", "batch_expired")})
    page = _get(server, f"/jobs/{job_id}").text
    codes = re.findall(r"<td>(\w+)</td><td class=\"number\">(\d+)</td>", page)
    assert codes == [("internal_error", "2"), ("batch_expired", "1")]
    errors = _get(server, f"/jobs/{job_id}/errors.jsonl")
    assert len(errors.text.splitlines()) == 3
    assert errors.headers["Content-Disposition"].startswith("attachment")
    assert _get(server, f"/jobs/{job_id}/output.jsonl").headers["Content-Type"] == "application/jsonl"
    assert _get(server, f"/jobs/{job_id}/other.jsonl").status_code == 404
    retried = _post(server, f"/jobs/{job_id}/retry").headers["Location"].removeprefix("/jobs/")
    assert server.http.get(f"/v1/batches/{retried}").json()["request_counts"]["total"] == 3


def test_failures_of_before_the_counts_by_code_are_shown(server: HttpServer, registry: TestRegistry) -> None:
    job_id = ended_job(registry, {1: ("b", "internal_error"), 2: ("c", "batch_expired"), 3: ("d", "batch_expired")})
    registry.redis.hdel(registry.keys.job(job_id), "e:batch_expired")
    page = _get(server, f"/jobs/{job_id}").text
    assert re.findall(r"<td>(\w+)</td><td class=\"number\">(\d+)</td>", page) == [
        ("internal_error", "1"),
        ("other", "2"),
    ]
    assert "<td>other</td>" not in _get(server, f"/jobs/{ended_job(registry, {1: ('b', 'internal_error')})}").text


def test_a_job_with_failures_before_it_was_planned_is_shown(server: HttpServer, registry: TestRegistry) -> None:
    job_id = registry.submit([b"x"] * 2)
    registry.redis.hset(registry.keys.job(job_id), "err", 1)  # as cancelling writes them, a part at a time
    for path in ("/", f"/jobs/{job_id}"):
        answer = _get(server, path)
        assert answer.status_code == 200
        assert "1 of 2" in answer.text


def test_what_is_sent_twice_makes_one_job(server: HttpServer, registry: TestRegistry) -> None:
    first, second = (re.findall(r'name="once" value="(\w+)"', _get(server, "/").text)[0] for _ in range(2))
    assert first != second
    job_id = _submit(server, "a.jsonl", once=first)
    assert _submit(server, "a.jsonl", once=first) == job_id
    others = [_submit(server, "a.jsonl", **fields) for fields in ({"once": second}, {"once": first, "model": "fake"})]
    assert len({job_id, *others}) == 3
    ended = ended_job(registry, {1: ("b", "internal_error")})
    retries = {_post(server, f"/jobs/{ended}/retry").headers["Location"] for _ in range(2)}
    assert len(retries) == 1


def test_an_accepted_job_is_told_where_its_file_could_not_be_deleted(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_arguments: object) -> None:
        raise redis.ConnectionError("gone")

    monkeypatch.setattr(FileStore, "delete", lost)
    job_id = _submit(server, "a.jsonl")
    assert _get(server, f"/jobs/{job_id}").status_code == 200


def test_workers_are_read_once_for_all_and_a_deleted_job_goes_at_once(
    server: HttpServer, registry: TestRegistry, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "EVERY_S", 600.0)
    ours, theirs = new_key(redis_url, "ours"), new_key(redis_url, "theirs")
    job_id = ended_job(registry, {}, SubmitOptions(tenant="ours"))
    assert job_id in _get(server, "/", ours).text
    directory = registry.directory("w1")
    directory.announce(Announcement(name="fake"))
    info = WorkerInfo(id="w1", version="1", model="fake", steps=0, open_requests=0, held=0)
    Heartbeats(directory, registry.keys).beat(info)
    assert "No worker is up" in _get(server, "/", theirs).text
    assert _post(server, f"/jobs/{job_id}/delete", cookie=ours).status_code == 303
    assert job_id not in _get(server, "/", ours).text


def test_what_a_user_can_name_is_escaped(server: HttpServer, registry: TestRegistry) -> None:
    options = SubmitOptions(metadata={EVIL[:40]: EVIL}, model=EVIL)
    job_id = registry.submit([b"x"], options)
    info = WorkerInfo(id=EVIL, version=EVIL, model=EVIL, steps=0, open_requests=0, held=0)
    directory = ModelDirectory(registry.redis, registry.keys, worker_id=EVIL)
    directory.announce(Announcement(name=EVIL))
    Heartbeats(directory, registry.keys).beat(info)
    _submit(server, EVIL.replace('"', ""), model=EVIL)
    for path in ("/", f"/jobs/{job_id}"):
        page = _get(server, path).text
        assert "alert(1)" in page
        assert "<script>alert" not in page
        assert page.count("<script") == 1
        assert "\"'&" not in page
    refused = _get(server, f"/jobs/{EVIL}".replace("/script", ""))
    assert refused.status_code == 404
    assert "<script>" not in refused.text


def test_a_page_loads_nothing_from_elsewhere_and_has_no_script_inside(server: HttpServer) -> None:
    job_id = _submit(server, "a.jsonl")
    for path in ("/", f"/jobs/{job_id}", "/sign-in", "/docs", "/jobs/none"):
        answer = _get(server, path)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["Cache-Control"] == "no-store"
        assert not re.search(r"<script>|<style|style=|\son\w+=|javascript:", answer.text)
        assert not FOREIGN_LINK.search(answer.text)
    for link in ('src="https://example.com/a.js"', 'href="//example.com"', 'action="javascript:a()"', 'href="a"'):
        assert FOREIGN_LINK.search(link)


def test_the_key_is_kept_in_a_cookie_that_no_script_reads(server: HttpServer, redis_url: str) -> None:
    key = new_key(redis_url, "team-a")
    assert _get(server, "/").headers["Location"] == "/sign-in"
    assert _post(server, "/sign-in", data={"key": key + "x"}).status_code == 401
    assert _post(server, "/sign-in", data={"key": ""}).status_code == 401
    answer = _post(server, "/sign-in", data={"key": key})
    assert answer.headers["Location"] == "/"
    cookie = answer.headers["Set-Cookie"]
    assert cookie.startswith(f"millrace_key={key};")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Secure" not in cookie
    secure = server.http.post(
        "/sign-in", data={"key": key}, headers={"Origin": server.url.replace("http:", "https:")}
    ).headers["Set-Cookie"]
    assert secure.startswith(f"__Host-millrace_key={key};")
    assert "Secure" in secure
    assert "Path=/;" in secure
    assert "Domain" not in secure
    assert "tenant team-a" in _get(server, "/", key).text
    dropped = _post(server, "/sign-out", cookie=key).headers.get_list("Set-Cookie")
    assert [cookie.partition(";")[0] for cookie in dropped] == ['millrace_key=""', '__Host-millrace_key=""']
    # The API takes no cookie: whatever a page can have a browser send, it is not its key.
    assert server.http.get("/v1/files", headers={"Cookie": f"millrace_key={key}"}).status_code == 401
    assert server.http.get("/", headers=bearer(key)).headers["Location"] == "/sign-in"


def test_a_cookie_that_another_site_may_have_set_is_not_taken(server: HttpServer, redis_url: str) -> None:
    ours, theirs = new_key(redis_url, "ours"), new_key(redis_url, "theirs")
    both = {"Cookie": f"millrace_key={theirs}; __Host-millrace_key={ours}"}
    assert "tenant ours" in server.http.get("/", headers=both).text
    twice = server.http.get("/", headers={"Cookie": f"millrace_key={theirs}; millrace_key={ours}"})
    assert twice.status_code == 400
    assert "came twice" in twice.text
    by_tls = {"Origin": server.url.replace("http:", "https:"), "Cookie": f"millrace_key={theirs}"}
    job = server.http.post("/jobs/s0-none/cancel", headers=by_tls)
    assert job.headers["Location"] == "/sign-in"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "https://example.com"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "OWN", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "OWN", "Sec-Fetch-Site": "same-site"},
    ],
)
def test_what_changes_something_has_to_come_from_a_page_of_this_server(
    server: HttpServer, redis_url: str, registry: TestRegistry, headers: dict[str, str]
) -> None:
    key = new_key(redis_url, "ours")
    job_id = _submit(server, "a.jsonl", cookie=key)
    before = {name: registry.redis.dump(name) for name in registry.redis.keys("*")}
    given = {name: server.url if value == "OWN" else value for name, value in headers.items()}
    for path in (
        "/jobs",
        "/sign-in",
        "/sign-out",
        *(f"/jobs/{job_id}/{what}" for what in ("cancel", "retry", "delete")),
    ):
        answer = server.http.post(path, headers={**given, "Cookie": f"millrace_key={key}"}, data={"key": key})
        assert answer.status_code == 403, path
        assert "Set-Cookie" not in answer.headers
    assert {name: registry.redis.dump(name) for name in registry.redis.keys("*")} == before


def test_a_tenants_pages_show_and_change_nothing_of_anothers(
    server: HttpServer, redis_url: str, registry: TestRegistry
) -> None:
    ours, theirs = new_key(redis_url, "ours"), new_key(redis_url, "theirs")
    job_id = _submit(server, "secret.jsonl", cookie=ours)
    ended = ended_job(registry, {1: ("b", "internal_error")}, SubmitOptions(tenant="ours"))
    before = {name: registry.redis.dump(name) for name in registry.redis.keys("*")}
    for job in (job_id, ended):
        for part in ("", "/events", "/output.jsonl", "/errors.jsonl"):
            assert _get(server, f"/jobs/{job}{part}", theirs).status_code == 404
        for what in ("cancel", "retry", "delete"):
            assert _post(server, f"/jobs/{job}/{what}", cookie=theirs).status_code == 404
    page = _get(server, "/", theirs).text
    assert not [told for told in ("secret.jsonl", job_id, ended) if told in page]
    assert {name: registry.redis.dump(name) for name in registry.redis.keys("*")} == before


def _parts(server: HttpServer, path: str, is_so: str, cookie: str = "") -> None:
    """Read events until one has this in it."""
    with server.http.stream("GET", path, headers={"Cookie": f"millrace_key={cookie}"}) as stream:
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        assert any(is_so in line for line in stream.iter_lines()), is_so


def test_an_open_page_is_told_what_changes(server: HttpServer) -> None:
    job_id = _submit(server, "a.jsonl")
    for path in ("/events", f"/jobs/{job_id}/events"):
        _parts(server, path, "validating")
    is_open, told = threading.Event(), list[str]()

    def read(_stop: threading.Event) -> None:
        with server.http.stream("GET", f"/jobs/{job_id}/events") as stream:
            for line in stream.iter_lines():
                told.append(line)
                if "state validating" in line:
                    is_open.set()
                if "state cancelled" in line:
                    return

    with running_thread(read):
        assert is_open.wait(30)
        assert not [line for line in told if "data-ended" in line]
        _post(server, f"/jobs/{job_id}/cancel")
        wait_until(lambda: [line for line in told if "state cancelled" in line])
    assert [line for line in told if "data-ended" in line]  # the page's script comes no more


def test_no_more_pages_are_live_than_may_be_and_none_keeps_the_server(redis_url: str) -> None:
    with socket.socket() as page:
        with serving(redis_url, max_streams=1) as server:
            host = server.url.removeprefix("http://")
            page.connect(("127.0.0.1", int(host.rpartition(":")[2])))
            page.sendall(f"GET /events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert page.recv(12) == b"HTTP/1.1 200"
            assert server.http.get("/events").status_code == 429
            assert server.http.head("/events").status_code == 200
            began_s = time.monotonic()
        assert time.monotonic() - began_s < live.STREAM_S / 2


def test_workers_are_shown_with_their_kv_and_hits(server: HttpServer, registry: TestRegistry) -> None:
    load = EngineLoad(kv_blocks=1000, used_kv_blocks=250, prompt_tokens=400, cached_tokens=300)
    info = WorkerInfo(id="w1", version="1", model="fake", steps=1, open_requests=7, held=1, engine=load)
    directory = registry.directory("w1")
    directory.announce(Announcement(name="fake"))
    heartbeats = Heartbeats(directory, registry.keys)
    heartbeats.beat(info)
    registry.serve("fake", "died")  # of which no heartbeat is fresh
    assert registry.workers() == [info]
    page = _get(server, "/").text
    assert "250 of 1,000 blocks" in page
    assert "75%" in page
    assert "died" not in page
    heartbeats.forget("w1")
    assert registry.workers() == []
    wait_until(lambda: "No worker is up" in _get(server, "/").text)
