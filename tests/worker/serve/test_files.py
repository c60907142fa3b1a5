"""Files over HTTP: how uploads come, what is refused, ranges of what is downloaded, and what a killed server leaves."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from settings import LimitSettings
from tests.support.http_servers import HttpServer, bearer, chat_lines, is_open, new_key, serving
from tests.support.processes import wait_until, warm_interpreter
from tests.support.redis_servers import free_port, redis_settings
from tests.support.registry import TestRegistry, ended_job, failure, must_claim, ok
from tests.support.workers import CLI
from worker.lines.files import BOM, LineSplitter, read_raw_lines
from worker.records.record import BatchFile
from worker.registry.exchange import text
from worker.registry.keys import UnitRef
from worker.registry.leases import NewShard

DATA = b'{"prompt": "a"}\n{"prompt": "b", "n": 2}\n{"prompt": "c"}\n'
BOUNDARY = "a-boundary"


@pytest.fixture
def server(redis_url: str) -> Iterator[HttpServer]:
    with serving(redis_url) as server:
        yield server


def _keys_of(registry: TestRegistry) -> set[str]:
    return {text(key).removeprefix(registry.keys.prefix) for key in registry.redis.keys("*")}


def _form(*parts: tuple[str, bytes], end: str = "--") -> bytes:
    """A body of parts, each its headers behind `form-data; ` and its data."""
    bodies = [
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + data + b"\r\n"
        for head, data in parts
    ]
    return b"".join(bodies) + f"--{BOUNDARY}{end}\r\n".encode()


def _post(server: HttpServer, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    content_type = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    answer = server.http.post("/v1/files", content=body, headers={**content_type, **headers})
    return answer.status_code, answer.json().get("error", answer.json())


PURPOSE = ('name="purpose"', b"batch")
FILE = ('name="file"; filename="a.jsonl"', DATA)


@given(
    data=st.lists(st.sampled_from([b"a", b"bcd", b"\r", b"\n", b"\r\n", b" ", BOM, b"x" * 9])).map(b"".join),
    cuts=st.lists(st.integers(0, 60)),
    most=st.integers(1, 12),
)
@example(data=BOM + b"\r\n" + BOM + b"12345\r\n\n123456\r", cuts=[1, 4], most=5)
@example(data=b"\nabcd\r\r\n", cuts=[], most=4)
def test_lines_are_the_same_however_the_data_are_cut(data: bytes, cuts: list[int], most: int) -> None:
    splitter, places = LineSplitter(most), sorted({0, *(min(cut, len(data)) for cut in cuts), len(data)})
    found = [line for first, last in pairwise(places) for line in splitter.feed(data[first:last])]
    assert [*found, *splitter.end()] == list(read_raw_lines(BytesIO(data), most))


def test_a_file_is_its_lines_without_blank_ones_and_other_line_ends(server: HttpServer) -> None:
    file_id = server.upload_id(BOM + b'{"prompt": 1}\r\n\r\n  \n{"prompt": 2}')
    content = server.http.get(f"/v1/files/{file_id}/content")
    assert content.content == b'{"prompt": 1}\n{"prompt": 2}\n'
    assert server.http.get(f"/v1/files/{file_id}").json()["bytes"] == len(content.content)


def test_fields_may_come_behind_the_file(server: HttpServer) -> None:
    assert _post(server, _form(FILE, PURPOSE))[0] == 200


REFUSED_FORMS = {
    "no purpose": (_form(FILE), 400, "purpose"),
    "another purpose": (_form(('name="purpose"', b"fine-tune"), FILE), 400, "purpose"),
    "no file": (_form(PURPOSE), 400, "file"),
    "two files": (_form(PURPOSE, FILE, FILE), 400, "file"),
    "a file without a name": (_form(PURPOSE, ('name="file"', DATA)), 400, "file"),
    "a name that is too long": (_form(PURPOSE, (f'name="file"; filename="{"x" * 256}"', DATA)), 400, "file"),
    "a field twice": (_form(PURPOSE, PURPOSE, FILE), 400, "purpose"),
    "a field of 1 kB": (_form(('name="purpose"', b"x" * 1024), FILE), 400, "purpose"),
    "an unknown field": (_form(PURPOSE, ('name="purposes"', b"batch"), FILE), 400, "purposes"),
    "a part without a name": (_form(PURPOSE, ("x=y", b"")), 400, None),
    "no end": (_form(PURPOSE, FILE, end=""), 400, None),
    "no form": (b"{}", 400, None),
    "no lines": (_form(PURPOSE, ('name="file"; filename="a"', b"\n \r\n")), 400, None),
    "gzip": (_form(PURPOSE, ('name="file"; filename="a"', b"\x1f\x8b\x08")), 400, "file"),
    "Parquet": (_form(PURPOSE, ('name="file"; filename="a"', b"PAR1" + b"\0" * 5000)), 400, "file"),
    "an expiry in a second": (
        _form(PURPOSE, ('name="expires_after[anchor]"', b"created_at"), ('name="expires_after[seconds]"', b"1"), FILE),
        400,
        "expires_after[seconds]",
    ),
    "an expiry from another time": (
        _form(PURPOSE, ('name="expires_after[anchor]"', b"now"), FILE),
        400,
        "expires_after[anchor]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED_FORMS)
def test_a_form_that_is_refused_leaves_nothing(server: HttpServer, registry: TestRegistry, kind: str) -> None:
    body, status, param = REFUSED_FORMS[kind]
    found, error = _post(server, body)
    assert (found, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert _keys_of(registry) == set()


def test_only_a_form_is_taken(server: HttpServer) -> None:
    assert _post(server, b"{}", **{"Content-Type": "application/json"})[0] == 415
    boundary = "x" * 257  # one more than the parser takes
    body = _form(PURPOSE, FILE).replace(BOUNDARY.encode(), boundary.encode())
    status, error = _post(server, body, **{"Content-Type": f"multipart/form-data; boundary={boundary}"})
    assert (status, error["param"]) == (400, "Content-Type")


def test_a_file_or_a_line_too_many_is_refused_and_leaves_nothing(redis_url: str, registry: TestRegistry) -> None:
    limits = LimitSettings(max_prompts_per_job=3, max_prompt_bytes=64, max_job_bytes=100)
    with serving(redis_url, limits=limits) as server:
        for data, code in ((b"{}\n" * 4, "too_many_tasks"), (b"x" * 60 + b"\n" + b"y" * 60, "file_too_large")):
            answer = server.upload(data)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, code)
        # Blank lines are not kept, and come to an end all the same.
        assert server.upload(b"\n" * 100_000).status_code == 413
        assert _keys_of(registry) == set()


def test_a_line_that_is_too_long_is_refused_and_not_cut(redis_url: str, registry: TestRegistry) -> None:
    with serving(redis_url, limits=LimitSettings(max_prompt_bytes=64)) as server:
        assert server.upload(b"x" * 64 + b"\r\n" + b"y" * 64).status_code == 200
        before = _keys_of(registry)
        for data in (b"{}\n\n" + b"x" * 65 + b"\n{}", b"{}\n" + b"x" * 1000, b"{}\n" + b" " * 65 + b"\n{}"):
            answer = server.upload(data)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, "file", "line_too_long")
            assert "line 2 " in error["message"]
            assert "64 bytes" in error["message"]
        assert _keys_of(registry) == before


def test_a_tenant_has_so_many_files_and_bytes_of_them_at_most(redis_url: str) -> None:
    with serving(redis_url, max_tenant_files=2) as server, serving(redis_url, max_tenant_file_bytes=100) as small:
        assert small.upload(b"x" * 101).json()["error"]["code"] == "too_many_files"
        file_id, _ = server.upload_id(b"x" * 90), server.upload_id(b"x")
        assert (server.upload(b"x").status_code, small.upload(b"x" * 20).status_code) == (429, 429)
        server.http.delete(f"/v1/files/{file_id}")
        assert (server.upload(b"x").status_code, small.upload(b"x").status_code) == (200, 200)


def test_a_file_that_has_expired_is_gone_and_counts_no_more(
    server: HttpServer, redis_url: str, registry: TestRegistry
) -> None:
    file_id = server.upload_id(DATA)
    staged_ttl = registry.redis.pttl(registry.keys.file_lines(file_id))
    assert 0 < staged_ttl <= 86_400_000
    key = registry.keys.files("default")
    entry = text(registry.redis.hget(key, file_id) or b"")
    _, _, rest = entry.split(" ", 2)
    registry.redis.hset(key, file_id, f"1 2 {rest}")
    assert server.http.get(f"/v1/files/{file_id}").status_code == 404
    assert server.http.get("/v1/files").json()["data"] == []
    with serving(redis_url, max_tenant_files=1) as narrow:
        assert narrow.upload(DATA).status_code == 200
    assert registry.redis.hlen(key) == 1


def test_an_upload_under_a_known_key_is_the_first_file(server: HttpServer, registry: TestRegistry) -> None:
    def upload(data: bytes) -> tuple[int, dict[str, Any]]:
        return _post(server, _form(PURPOSE, ('name="file"; filename="a"', data)), **{"Idempotency-Key": "one"})

    first, again = upload(DATA), upload(DATA)
    assert first == again
    assert first[0] == 200
    assert upload(DATA + b"{}")[0] == 409
    assert server.http.get(f"/v1/files/{first[1]['id']}/content").content == DATA
    assert len(_keys_of(registry)) == 2


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("0-4", slice(0, 5)),
        ("5-", slice(5, None)),
        ("-7", slice(-7, None)),
        ("20-30", slice(20, 31)),
        ("3-999", slice(3, None)),
    ],
)
def test_a_range_is_those_bytes(server: HttpServer, wanted: str, expected: slice) -> None:
    file_id = server.upload_id(DATA)
    answer = server.http.get(f"/v1/files/{file_id}/content", headers={"Range": f"bytes={wanted}"})
    first, last, _ = expected.indices(len(DATA))
    assert (answer.status_code, answer.content) == (206, DATA[expected])
    assert answer.headers["Content-Range"] == f"bytes {first}-{last - 1}/{len(DATA)}"


def test_a_range_behind_the_end_is_refused_and_no_range_is_all(server: HttpServer) -> None:
    url = f"/v1/files/{server.upload_id(DATA)}/content"
    etag = server.http.get(url).headers["ETag"]
    behind = server.http.get(url, headers={"Range": "bytes=999-"})
    assert (behind.status_code, behind.headers["Content-Range"]) == (416, f"bytes */{len(DATA)}")
    for headers in ({"Range": "bytes=0-1,4-5"}, {"Range": "lines=0-1"}, {"Range": "bytes=0-1", "If-Range": '"other"'}):
        assert server.http.get(url, headers=headers).content == DATA
    assert server.http.get(url, headers={"Range": "bytes=0-1", "If-Range": etag}).content == DATA[:2]
    for headers in ({}, {"Range": "bytes=0-1"}, {"Range": "bytes=999-"}):  # of which HEAD knows nothing
        head = server.http.head(url, headers=headers)
        found = (head.status_code, head.headers["ETag"], head.headers["Content-Length"])
        assert found == (200, etag, str(len(DATA)))


def _half_done(registry: TestRegistry) -> str:
    """A job of four lines of which two have an answer and one an error."""
    registry.serve("fake")
    job_id, leases = registry.submit([b"{}"] * 4), registry.leases()
    leases.planned(must_claim(leases, UnitRef.plan(job_id)), [NewShard(range(4), model="fake")], ageing_s=60.0)
    answers = [
        ok(index, f'{{"id":"{index}","custom_id":null,"response":{{"status_code":200,"body":"\\u00e4"}}}}')
        for index in (2, 0)
    ]
    leases.put(must_claim(leases, UnitRef.shard(job_id, 0)), [answers[0], failure(job_id, 1, "b"), answers[1]])
    return job_id


def test_ranges_of_records_are_of_their_file_alone(server: HttpServer, registry: TestRegistry) -> None:
    job_id = _half_done(registry)
    for kind, count in ((BatchFile.OUTPUT, 2), (BatchFile.ERROR, 1)):
        url = f"/v1/files/{kind.id_of(job_id)}"
        whole = server.http.get(f"{url}/content")
        assert len(whole.content.splitlines()) == count
        assert server.http.get(url).json()["bytes"] == len(whole.content)
        part = server.http.get(f"{url}/content", headers={"Range": "bytes=7-"})
        assert part.content == whole.content[7:]
        assert part.headers["Content-Range"] == f"bytes 7-{len(whole.content) - 1}/*"
        # It is one of two files, whose size nobody keeps.
        assert "Content-Length" not in server.http.head(f"{url}/content").headers
    output = server.http.get(f"/v1/files/{BatchFile.OUTPUT.id_of(job_id)}/content")
    assert [json.loads(line)["id"] for line in output.content.splitlines()] == ["2", "0"]


def test_a_jobs_only_file_goes_with_it_and_neither_of_two_alone(server: HttpServer, registry: TestRegistry) -> None:
    both = ended_job(registry, {1: ("b", "internal_error")})
    output = f"/v1/files/{BatchFile.OUTPUT.id_of(both)}"
    assert server.http.delete(output).status_code == 409
    assert server.http.get(f"{output}/content").status_code == 200
    assert server.http.delete(f"/v1/batches/{both}").json()["deleted"]
    assert server.http.get(output).status_code == 404
    alone = ended_job(registry, {})
    assert server.http.delete(f"/v1/files/{BatchFile.OUTPUT.id_of(alone)}").json()["deleted"]
    assert server.http.get(f"/v1/batches/{alone}").status_code == 404
    assert server.http.delete(f"/v1/batches/{registry.submit([b'{}'])}").status_code == 409


def test_a_server_killed_in_mid_upload_leaves_only_what_ends_by_itself(
    redis_url: str, registry: TestRegistry, tmp_path: Path
) -> None:
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        process = warm_interpreter().start(CLI, ["serve", "--port", str(port), "--redis-url", redis_url], log)
    try:
        wait_until(lambda: is_open(port))
        with socket.create_connection(("127.0.0.1", port)) as upload:
            part = _form(PURPOSE, FILE)[:-30]
            head = f"POST /v1/files HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Length: 9000000\r\n"
            upload.sendall(f"{head}Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n".encode())
            upload.sendall(part + chat_lines("a") * 10_000)
            wait_until(lambda: registry.redis.keys("*:f:*"))
            process.kill()
            process.wait(30)
    finally:
        process.kill()
    left = registry.redis.keys("*")
    assert {text(key).split(":")[-2] for key in left} == {"in"}
    assert [0 < registry.redis.pttl(key) <= 3_600_000 for key in left] == [True]


def test_a_client_that_goes_away_or_stops_leaves_nothing(redis_url: str, registry: TestRegistry) -> None:
    limits = LimitSettings(max_prompt_bytes=1024)
    with serving(redis_url, limits=limits, read_timeout_s=3) as server:
        port = int(server.url.rpartition(":")[2])
        head = f"POST /v1/files HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Length: 9000000\r\n"
        head += f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n"
        for is_closed in (True, False):
            upload = socket.create_connection(("127.0.0.1", port))
            upload.sendall(head.encode() + _form(PURPOSE, FILE)[:-30] + chat_lines("a") * 10_000)
            wait_until(lambda: registry.redis.keys("*:f:*"))
            if is_closed:
                upload.close()
            wait_until(lambda: not registry.redis.keys("*"))
            upload.close()


def _open_upload(server: HttpServer, key: str = "") -> socket.socket:
    """An upload of 9 MB of which a part has come."""
    port = int(server.url.rpartition(":")[2])
    upload = socket.create_connection(("127.0.0.1", port), timeout=30)
    head = f"POST /v1/files HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Length: 9000000\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    head += f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n"
    upload.sendall(head.encode() + _form(PURPOSE, FILE)[:-30])
    return upload


def _answer(upload: socket.socket) -> bytes:
    """The error that it is answered with."""
    found = b""
    while not found.endswith(b"}}"):
        part = upload.recv(65536)
        assert part, found
        found += part
    return found


def test_one_tenant_takes_half_of_the_uploads_at_once(redis_url: str) -> None:
    ours, theirs = new_key(redis_url, "ours"), new_key(redis_url, "theirs")
    with serving(redis_url, max_uploads=2) as server:
        with _open_upload(server, ours):
            seen = bearer(new_key(redis_url, None))
            figure = "millrace_http_open_uploads 1.0"
            wait_until(lambda: figure in server.http.get("/metrics", headers=seen).text)
            assert server.upload(DATA, ours).json()["error"]["code"] == "too_many_uploads"
            assert server.upload(DATA, theirs).status_code == 200
        wait_until(lambda: server.upload(DATA, ours).status_code == 200)


def test_an_upload_that_takes_too_long_or_has_no_room_ends_early(redis_url: str, registry: TestRegistry) -> None:
    with serving(redis_url, upload_timeout_s=1, max_tenant_files=1) as server:
        with _open_upload(server) as upload:
            answer = _answer(upload)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"serve.upload_timeout_s" in answer
        assert _keys_of(registry) == set()
    with serving(redis_url, max_tenant_files=1) as server:
        server.upload_id(DATA)
        with _open_upload(server) as upload:
            assert _answer(upload).startswith(b"HTTP/1.1 429 ")


def test_a_file_beyond_the_tenants_bytes_is_refused_as_it_comes(redis_url: str) -> None:
    with serving(redis_url, max_tenant_file_bytes=20) as server, _open_upload(server) as upload:
        answer = _answer(upload)
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"too_many_files" in answer


def test_a_download_that_nobody_reads_is_given_up(redis_url: str) -> None:
    with serving(redis_url, max_downloads=1, read_timeout_s=5) as server:
        data = chat_lines("a" * 3_850) * 5_000
        url = f"/v1/files/{server.upload_id(data)}/content"
        with socket.socket() as download:
            download.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            download.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            download.sendall(f"GET {url} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert download.recv(1) == b"H"
            refused = server.http.get(url)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_downloads")
            wait_until(lambda: server.http.head(url).status_code == 200)
        assert server.http.get(url).content == data


def test_a_job_outlives_its_file(server: HttpServer, registry: TestRegistry) -> None:
    file_id = server.upload_id(chat_lines("a", "b"))
    job_id = server.create_id(file_id)
    assert server.http.delete(f"/v1/files/{file_id}").status_code == 200
    assert registry.redis.hlen(registry.keys.lines(job_id)) == 2
    assert server.create(file_id).json()["error"]["param"] == "input_file_id"


def test_a_full_redis_says_so(redis_url: str, registry: TestRegistry) -> None:
    with serving(redis_url, redis=redis_settings(redis_url, allow_unsafe=True)) as server:
        registry.redis.config_set("maxmemory", 1)
        try:
            answer = server.upload(DATA)
        finally:
            registry.redis.config_set("maxmemory", 0)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert "memory" in answer.json()["error"]["message"]
