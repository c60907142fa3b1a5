"""Servers that are killed, and clients that mean no good: ambiguous requests, idle and slow ones by the thousand."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.support.http_servers import HttpServer, chat_lines, serving
from tests.support.processes import WarmProcess, wait_until, warm_interpreter
from tests.support.redis_servers import free_port
from tests.support.registry import TestRegistry, must_claim, ok
from tests.support.workers import CLI, COMMAND
from worker.registry.keys import UnitRef

HEAD = b"POST /v1/batches HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SMUGGLED = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

# What a proxy before the server may end elsewhere than the server does.
SHAPES = {
    "both lengths, chunked first": HEAD
    + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "both lengths, length first": HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk's size that is no number": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk's size below nought": CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk's size with a prefix": CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk's size beyond any": CHUNKED + b"f" * 40 + b"\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk longer than it says": CHUNKED + b"1\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "chunked twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "an encoding that is nearly chunked": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a header that is folded": HEAD + b"X: a\r\n Content-Length: 4\r\nContent-Length: 0x4\r\n\r\n{}  " + SMUGGLED,
    "a length with a sign": HEAD + b"Content-Length: +2\r\n\r\n{}" + SMUGGLED,
    "a line end inside a header": HEAD + b"X: a\rContent-Length: 4\r\n\r\n" + SMUGGLED,
    "a header without a name": HEAD + b": a\r\n\r\n" + SMUGGLED,
    "a null in a header": HEAD + b"X: a\x00b\r\n\r\n" + SMUGGLED,
}

NUM_IDLE = 10_000


def _port(server: HttpServer) -> int:
    return int(server.url.rpartition(":")[2])


def _answers(server: HttpServer, data: bytes) -> bytes:
    """What comes until the connection is closed."""
    with socket.create_connection(("127.0.0.1", _port(server)), timeout=30) as connection:
        connection.sendall(data)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65_536):
                found += part
        return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_request_that_can_be_read_in_two_ways_ends_the_connection(redis_url: str, shape: str) -> None:
    with serving(redis_url, read_timeout_s=2) as server:
        found = _answers(server, SHAPES[shape])
        assert found.startswith(b"HTTP/1.1 4") or found == b"", found[:200]
        assert found.count(b"HTTP/1.1 ") <= 1, found
        assert server.http.get("/healthz").status_code == 200


def test_lines_that_end_in_a_bare_line_feed_are_read_in_one_way(redis_url: str) -> None:
    """RFC 9112 lets a server take them; what follows the header's end is then the body, and no other request."""
    data = HEAD.replace(b"\r\n", b"\n") + b"Content-Length: %d\n\n" % len(SMUGGLED) + SMUGGLED
    with serving(redis_url, read_timeout_s=2) as server:
        found = _answers(server, data)
        assert found.startswith(b"HTTP/1.1 400 ")
        assert found.count(b"HTTP/1.1 ") == 1


@contextlib.contextmanager
def _process(
    redis_url: str, log: Path, *options: str, is_warm: bool = False
) -> Iterator[tuple[subprocess.Popen[bytes] | WarmProcess, str]]:
    """`is_warm`: without the seconds that imports take, and with the limits of when the tests began."""
    port = free_port()
    arguments = ["serve", "--port", str(port), "--redis-url", redis_url, *options]
    process: subprocess.Popen[bytes] | WarmProcess
    with log.open("wb") as output:
        if is_warm:
            process = warm_interpreter().start(CLI, arguments, output)
        else:
            process = subprocess.Popen([*COMMAND, *arguments], stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.get(f"{url}/healthz", trust_env=False).status_code == 200
        return False

    try:
        wait_until(is_up, timeout_s=120)
        yield process, url
    finally:
        process.kill()
        process.wait(30)


def _until_killed(http: httpx2.Client, url: str, process: subprocess.Popen[bytes] | WarmProcess) -> tuple[bytes, str]:
    """What came of a file until its server was killed, which is once something has; and its ETag."""
    got, etag, is_told = b"", "", False
    try:
        with http.stream("GET", url) as stream:
            etag = stream.headers.get("ETag", "")
            for part in stream.iter_raw():
                got += part
                process.kill()
    except httpx2.TransportError:
        is_told = True
    assert is_told  # that it is not all
    return got, etag


def _answered_job(registry: TestRegistry, num_answers: int, shard_size: int = 50) -> tuple[str, bytes]:
    """A job that runs, and the file of the answers that it has: all but that to its last line."""
    shards = [range(start, start + shard_size) for start in range(0, num_answers, shard_size)]
    job_id, leases = registry.running_job(*shards, [num_answers]), registry.leases()
    records = [
        f'{{"id":"{index}","response":{{"status_code":200}},"text":"{"x" * 40_000}"}}' for index in range(num_answers)
    ]
    for number, shard in enumerate(shards):
        leases.put(must_claim(leases, UnitRef.shard(job_id, number)), [ok(index, records[index]) for index in shard])
    return job_id, "".join(f"{record}\n" for record in records).encode()


def test_a_download_whose_server_is_killed_goes_on_at_another(
    redis_url: str, registry: TestRegistry, tmp_path: Path
) -> None:
    data = chat_lines(*(f"{number}{'x' * 4000}" for number in range(4000)))  # more than any buffer on the way holds
    job_id, answers = _answered_job(registry, 400)
    with (
        _process(redis_url, tmp_path / "1", is_warm=True) as (first, url),
        _process(redis_url, tmp_path / "2", is_warm=True) as (second, other),
        _process(redis_url, tmp_path / "3", is_warm=True) as (_, third),
        httpx2.Client(trust_env=False, timeout=60) as http,
    ):
        answer = http.post(f"{url}/v1/files", files={"file": ("a.jsonl", data)}, data={"purpose": "batch"})
        path = f"/v1/files/{answer.json()['id']}/content"
        got, etag = _until_killed(http, url + path, first)
        assert 0 < len(got) < len(data)
        rest = http.get(other + path, headers={"Range": f"bytes={len(got)}-", "If-Range": etag})
        assert rest.status_code == 206
        assert rest.headers["Content-Range"] == f"bytes {len(got)}-{len(data) - 1}/{len(data)}"
        assert got + rest.content == data

        # The output of a job that runs: it has no size and no ETag yet, and what came stays its beginning.
        path = f"/v1/files/file-{job_id}-output/content"
        got, etag = _until_killed(http, other + path, second)
        assert 0 < len(got) < len(answers)
        rest = http.get(third + path, headers={"Range": f"bytes={len(got)}-"})
        assert (etag, rest.status_code, rest.headers["X-Incomplete"]) == ("", 206, "true")
        assert rest.headers["Content-Range"] == f"bytes {len(got)}-{len(answers) - 1}/*"
        assert got + rest.content == answers


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nX-Slow: "], ids=["idle", "slow"])
def test_ten_thousand_idle_or_slow_connections_hold_up_no_other(redis_url: str, tmp_path: Path, sent: bytes) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = NUM_IDLE + 1000  # here as in the server's process, which inherits the limit
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"a process may open {hard} files here; {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    options = [f"--set=serve.max_connections={NUM_IDLE + 100}", "--set=serve.read_timeout_s=600"]
    try:
        with (
            _process(redis_url, tmp_path / "log", *options) as (_, url),
            httpx2.Client(base_url=url, trust_env=False, timeout=60) as http,
            contextlib.ExitStack() as stack,
        ):
            server = HttpServer(url, http)
            for number in range(NUM_IDLE):
                idle = stack.enter_context(socket.create_connection(("127.0.0.1", _port(server)), timeout=30))
                idle.sendall(sent)
                if number % 1000 == 0:
                    assert http.get("/healthz").status_code == 200
            file_id = server.upload_id(chat_lines("a"))
            assert server.create(file_id).status_code == 200
            assert http.get(f"/v1/files/{file_id}/content").content == chat_lines("a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
