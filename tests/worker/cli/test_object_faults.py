"""Object storage that refuses, has other rules than S3 or needs a login: by moto and by servers of a few lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.object_stores import (
    BUCKET,
    KEY,
    PASS,
    REFUSE,
    SECRET,
    ObjectStore,
    Seen,
    millrace,
    moto_store,
    proxied,
    serving,
)
from tests.support.registry import TestRegistry, ended_job, failure, must_claim, ok
from worker.lines.errors import UnreadableInput
from worker.registry.keys import UnitRef
from worker.storage.objects import find_objects
from worker.storage.urls import StorageError, object_url

RECORD_BYTES = 1 << 20
NUM_RECORDS = 12  # of which the last is an answer


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with moto_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store


def job_of_errors(registry: TestRegistry) -> str:
    """An ended job: records without an answer, of RECORD_BYTES each, and at the end one with an answer."""
    job_id = registry.running_job(range(NUM_RECORDS))
    leases = registry.leases()
    claim = must_claim(leases, UnitRef.shard(job_id, 0))
    for index in range(NUM_RECORDS - 1):
        leases.put(claim, [failure(job_id, index, "x" * RECORD_BYTES)])
    leases.put(claim, [ok(NUM_RECORDS - 1, json.dumps({"response": {"status_code": 200}}))])
    return job_id


def test_no_output_is_there_where_that_of_the_errors_broke_off(
    store: ObjectStore, registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = job_of_errors(registry)
    command = ("results", job_id, "-o", f"s3://{BUCKET}/out/")
    millrace(registry, *command)
    store.client.delete_object(Bucket=BUCKET, Key="out/output.jsonl")

    def rule(seen: Seen) -> str:
        return REFUSE if seen.part > 2 and "errors.jsonl" in seen.target else PASS

    with proxied(store, rule) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setattr("worker.storage.stores.MAX_RETRIES", 0)
        # Parts so small that the refusal is told to a write among the records, not at their end.
        monkeypatch.setattr("worker.storage.objects.PART_BYTES", RECORD_BYTES)
        monkeypatch.setattr("worker.storage.objects.PARTS_AT_ONCE", 1)
        done = millrace(registry, *command, exit_code=1)

    assert f"s3://{BUCKET}/out/errors.jsonl: its server answered 503" in done.stderr
    assert (store.keys, store.uploads) == (["out/errors.jsonl"], [])


class Azure(BaseHTTPRequestHandler):
    """Blobs by Azure's rules for the names of metadata; knows no container but one."""

    blobs: ClassVar[dict[str, dict[str, str]]]  # metadata by path
    requests: ClassVar[list[str]]

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.requests.append(self.path)
        path, _, query = self.path.partition("?")
        metadata = {name.lower(): value for name, value in self.headers.items() if name.lower().startswith("x-ms-meta")}
        if not path.startswith("/bucket/"):
            self._answer(404, code="ContainerNotFound")
        elif not all(name.removeprefix("x-ms-meta-").isidentifier() for name in metadata):
            self._answer(400, code="InvalidMetadata")
        else:
            if "comp=block&" not in f"{query}&":
                self.blobs[path] = metadata
            self._answer(201)

    def do_HEAD(self) -> None:
        metadata = self.blobs.get(self.path)
        if metadata is None:
            self._answer(404)
        else:
            self._answer(200, **metadata)

    def _answer(self, status: int, *, code: str = "", **headers: str) -> None:
        body = f"<Error><Code>{code}</Code></Error>".encode() if code else b""
        self.send_response(status)
        fixed = {"ETag": '"1"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Content-Length": str(len(body))}
        for name, value in {**fixed, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Azure]]:
    class Server(Azure):
        blobs: ClassVar[dict[str, dict[str, str]]] = {}
        requests: ClassVar[list[str]] = []

    with serving(Server) as url:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", url)
        yield Server


def test_azure_takes_an_object_and_its_metadata(azure: type[Azure], registry: TestRegistry) -> None:
    job_id = ended_job(registry, {})

    millrace(registry, "results", job_id, "-o", "az://bucket/o.jsonl")
    again = millrace(registry, "results", job_id, "-o", "az://bucket/o.jsonl")

    assert azure.blobs["/bucket/o.jsonl"]["x-ms-meta-millracejob"] == job_id
    assert "it is left as it is" in again.stderr


def test_azure_is_tried_before_a_job_is_submitted(azure: type[Azure], registry: TestRegistry, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"{}\n")

    done = millrace(registry, "submit", f"{tmp_path}/in.jsonl", "-o", "az://none/o.jsonl", exit_code=2)

    assert "az://none/o.jsonl: there is no such bucket" in done.stderr
    assert all("comp=block&" in f"{request}&" for request in azure.requests)
    assert (registry.jobs(), azure.blobs) == ([], {})


def of_tags(*tags: str) -> type[BaseHTTPRequestHandler]:
    """200,000 bytes whose ETag is the next of these, the last for good; by RFC 9110 a weak one matches none."""
    left = list(tags)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tag = left.pop(0) if len(left) > 1 else left[0]
            if self.headers["If-Match"] and (tag.startswith("W/") or tag != self.headers["If-Match"]):
                self.send_error(412)
                return
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            count = min(last, 199_999) - first + 1
            self.send_response(206)
            self.send_header("ETag", tag)
            self.send_header("Content-Range", f"bytes {first}-{first + count - 1}/200000")
            self.send_header("Content-Length", str(count))
            self.end_headers()
            self.wfile.write(bytes(count))

        def log_message(self, *_arguments: object) -> None:
            pass

    return Handler


def test_a_file_of_a_weak_etag_is_read() -> None:
    with serving(of_tags('W/"1"')) as url:
        [found] = find_objects(object_url(f"{url}/a.jsonl"))

        assert found.open().read() == bytes(200_000)


def test_a_changed_weak_etag_is_noticed() -> None:
    with serving(of_tags('W/"1"', 'W/"1"', 'W/"2"')) as url:
        [found] = find_objects(object_url(f"{url}/a.jsonl"))

        with pytest.raises(UnreadableInput, match="replaced while it was read"):
            found.open().read()


class NoObject(BaseHTTPRequestHandler):
    """Notes how requests are signed; has nothing."""

    signatures: ClassVar[list[str]]

    def do_HEAD(self) -> None:
        self.signatures.append(self.headers["Authorization"])
        self.send_error(404)

    def do_POST(self) -> None:  # to STS
        body = b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>not you</Message></Error></ErrorResponse>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def no_object() -> Iterator[tuple[str, list[str]]]:
    """The URL of a server without objects, and the signatures that it saw."""

    class Server(NoObject):
        signatures: ClassVar[list[str]] = []

    with serving(Server) as url:
        yield url, Server.signatures


OF_KEYS = f"aws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n"


def use_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: str) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text(f"[profile p]\n{config}")
    (tmp_path / "credentials").write_text(f"[keys]\n{OF_KEYS}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "p")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_environment_goes_before_the_profile(
    no_object: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    url, signatures = no_object
    use_profile(monkeypatch, tmp_path, f"{OF_KEYS}region=us-west-1\nendpoint_url=http://127.0.0.1:9\n")
    monkeypatch.setattr("worker.storage.stores.MAX_RETRIES", 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv(variable, url)
    monkeypatch.setenv("AWS_REGION", "eu-west-3")

    with pytest.raises(StorageError, match="there is no such object"):
        find_objects(object_url(f"s3://{BUCKET}/a.jsonl"))

    [signature] = signatures
    assert "/eu-west-3/s3/" in signature


OF_SSO = "sso_start_url=https://none\nsso_region=us-east-1\nsso_account_id=1\nsso_role_name=r\n"
OF_ROLE = "role_arn=arn:aws:iam::123456789012:role/r\nsource_profile=keys\n"


@pytest.mark.parametrize(
    ("config", "told"), [(OF_SSO, "SSO"), (OF_ROLE, "AccessDenied.*AssumeRole.*not you")], ids=["sso", "role"]
)
def test_a_login_that_gives_no_keys_is_told_as_that(
    no_object: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: str, told: str
) -> None:
    use_profile(monkeypatch, tmp_path, f"{config}region=us-east-1\n")
    monkeypatch.setenv("AWS_ENDPOINT_URL", no_object[0])

    with pytest.raises(StorageError, match=f"AWS' configuration or login: .*{told}"):
        find_objects(object_url(f"s3://{BUCKET}/a.jsonl"))


def test_errors_go_to_the_path_of_a_file_url(registry: TestRegistry, tmp_path: Path) -> None:
    job_id = ended_job(registry, {1: ("b", "internal_error")})

    millrace(registry, "errors", job_id, "-o", f"{tmp_path.as_uri()}/e.jsonl")

    assert len((tmp_path / "e.jsonl").read_bytes().splitlines()) == 1
