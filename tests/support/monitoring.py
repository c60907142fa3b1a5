"""Looks at workers from outside: a worker's own pages, a Prometheus, a collector of spans, a headless Chromium.

Prometheus runs with the configuration of worker/monitor, but for where the workers are. The collector is an HTTP server
that takes OTLP and keeps what it gets in memory. `monitored_run` runs a worker with all that an operator has to watch
it.
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import wait_until
from tests.support.redis_servers import AclRedis, acl_redis, free_port
from tests.support.workers import COMMAND
from worker.client import BatchClient

START_TIMEOUT_S = 60.0
INTERVAL = "1s"  # of scrapes
# Small shards and few slots, so that a job of some seconds is a queue to look at.
WORKER_SETTINGS = (
    "engine.num_threads=1", "engine.max_num_seqs=8", "engine.kv_cache.num_blocks=80", "worker.shard_size=10",
    "worker.concurrency=2", "worker.send_events=true", "metrics.queue_interval_s=1",
)  # fmt: skip
SYSTEM = "You answer in the style of a miller who has seen every river and trusts none of them. "

# What a scrape sees only while jobs run, as conditions.
SEEN_UNDER_WAY = (
    "min_over_time(millrace_engine_free_kv_blocks[10m]) < max_over_time(millrace_engine_kv_blocks[10m])",
    "max_over_time(millrace_engine_running_sequences[10m]) > 0",
    "max(max_over_time(millrace_queue_open_prompts[10m]))"
    ' > max(max_over_time(millrace_queue_tenant_open_prompts{tenant="shop"}[10m])) > 0',
    'max_over_time(millrace_queue_waiting_shards{tenant="shop",priority="5"}[10m]) > 0',
    'max_over_time(millrace_queue_waiting_shards{tenant="press",priority="2"}[10m]) > 0',
)
UNDER_WAY_TIMEOUT_S = 120.0

SCRAPE_TIMEOUT_S = 5.0

PROMETHEUS_START_TIMEOUT_S = 30.0

MONITOR = Path(__file__).resolve().parents[2] / "worker" / "monitor"
DASHBOARD = MONITOR / "grafana" / "dashboards" / "millrace.json"

# What Grafana puts in place of its variables; the interval is four scrapes.
_VARIABLES = {"$__rate_interval": "40s", "$instance": ".*"}
_NAME = re.compile(r"(?<![\w\"./-])(?:millrace|process)_[a-z0-9_]+\b(?!\s*=)")
_HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")

CHROMIUM_TIMEOUT_S = 60.0
# Nothing but the page: no sandbox (we may be root), no GPU, nothing that calls home.
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


@dataclass(frozen=True)
class MonitoredRun:
    """Where to look once the jobs are done, while everything still runs."""

    server: AclRedis
    started_s: float  # Unix time
    prometheus_url: str
    flower_url: str
    flower_password: str
    worker_id: str


@contextmanager
def monitored_run(directory: Path, model: Path) -> Iterator[MonitoredRun]:
    """Redis with its users, a worker with metrics and events, Prometheus and Flower; two tenants' jobs are run."""
    metrics_port, flower_port = free_port(), free_port()
    settings = [f"--set={setting}" for setting in (*WORKER_SETTINGS, f"metrics.port={metrics_port}")]
    password_file = directory / "page-password"
    with (
        acl_redis(directory, port=free_port()) as server,
        BatchClient(server.producer_url) as client,
        _running(directory / "flower.log", server.flower_url,
                 "flower", f"--port={flower_port}", f"--password-file={password_file}"),
        _running(directory / "worker.log", server.worker_url, "worker", f"--model={model}", *settings),
        prometheus(directory, [f"127.0.0.1:{metrics_port}"], interval=INTERVAL) as prometheus_url,
    ):  # fmt: skip
        flower_url = f"http://127.0.0.1:{flower_port}"
        wait_until(lambda: status_of(flower_url) == 401, timeout_s=START_TIMEOUT_S)
        wait_until(client.workers, timeout_s=START_TIMEOUT_S)
        wait_until(lambda: instant(prometheus_url, "millrace_healthy == 1"), timeout_s=START_TIMEOUT_S)
        started_s = time.time()
        _run_jobs(client, prometheus_url)
        # Two more scrapes: the last records are in them.
        ended_s = time.time()
        wait_until(lambda: instant(prometheus_url, f"timestamp(millrace_healthy) > {ended_s + 1}"))
        (worker,) = client.workers()
        password = password_file.read_text().strip()
        yield MonitoredRun(server, started_s, prometheus_url, flower_url, password, worker.id)


def status_of(url: str, authorization: str | None = None, *, method: str = "GET") -> int | None:
    """The HTTP status of an answer; None where nobody answers."""
    headers = {} if authorization is None else {"Authorization": authorization}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return None


def _run_jobs(client: BatchClient, prometheus_url: str) -> None:
    """Run jobs of two tenants until Prometheus saw such under way.

    A fast machine ends them between two scrapes: the next ones have twice the prompts.
    """
    client.wait(client.submit([{"prompt": "Hello", "no_such_parameter": 1}] * 5, tenant="press"), timeout_s=100.0)
    sizes = itertools.accumulate(itertools.repeat(2), operator.mul, initial=80)

    def are_seen() -> bool:
        size = next(sizes)
        jobs = [
            client.submit(_lines("A customer", size), tenant="shop"),
            client.submit(_lines("A reader", size), tenant="press", priority=2),
        ]
        for job in jobs:
            client.wait(job, timeout_s=100.0)
        return all(instant(prometheus_url, condition) for condition in SEEN_UNDER_WAY)

    wait_until(are_seen, timeout_s=UNDER_WAY_TIMEOUT_S)


def _lines(name: str, count: int) -> list[dict[str, object]]:
    return [
        {"prompt": f"{SYSTEM}{name} asks question {number}.", "max_tokens": 32, "temperature": 0}
        for number in range(count)
    ]


@contextmanager
def _running(log_file: Path, redis_url: str, *arguments: str) -> Iterator[None]:
    with log_file.open("wb") as log:
        # As in a container: the URL with its password where `ps` does not show it.
        environment = {**os.environ, "MILLRACE_REDIS__URL": redis_url}
        process = subprocess.Popen([*COMMAND, *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(timeout=START_TIMEOUT_S) == 0, log_file.read_text()


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=SCRAPE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def scrape(port: int) -> dict[str, float]:
    """Value by sample: `name` or `name{label="value",...}`, labels in alphabetical order."""
    status, text = get(port, "/metrics")
    assert status == 200, text
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def health(port: int) -> tuple[int, list[str]]:
    """Status of /healthz and its reasons."""
    status, text = get(port, "/healthz")
    return status, json.loads(text)["reasons"]


@contextmanager
def prometheus(directory: Path, targets: Sequence[str], *, interval: str) -> Iterator[str]:
    """Scrape `targets`, such as 127.0.0.1:9464, every `interval`, and run the alert rules; yields its URL."""
    executable = shutil.which("prometheus")
    assert executable is not None
    config = yaml.safe_load((MONITOR / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    (scrape,) = config["scrape_configs"]
    del scrape["dns_sd_configs"]
    scrape["static_configs"] = [{"targets": list(targets)}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(MONITOR / "alerts.yml", directory)
    address = f"127.0.0.1:{free_port()}"
    options = {"config.file": "prometheus.yml", "storage.tsdb.path": "data", "web.listen-address": address}
    command = [executable, *(f"--{name}={value}" for name, value in options.items())]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: _is_ready(f"http://{address}"), timeout_s=PROMETHEUS_START_TIMEOUT_S)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=PROMETHEUS_START_TIMEOUT_S)


def instant(url: str, expression: str) -> list[dict[str, Any]]:
    """The series of an expression now: `metric` its labels, `value` [time, text]."""
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=10) as answer:
        series: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return series


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=1):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


def alert_rules() -> list[dict[str, Any]]:
    """The rules of alerts.yml."""
    groups = yaml.safe_load((MONITOR / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, without the headings of its rows."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions(panel: dict[str, Any], **variables: str) -> list[str]:
    """A panel's expressions as Prometheus gets them."""
    values = {**_VARIABLES, **{f"${name}": value for name, value in variables.items()}}
    texts = [target["expr"] for target in panel["targets"]]
    for name, value in values.items():
        texts = [text.replace(name, value) for text in texts]
    return texts


def metric_names(expression: str) -> set[str]:
    """Names of the metrics that an expression reads; a histogram without _bucket, _sum or _count."""
    names = set(_NAME.findall(expression))
    return {next((name.removesuffix(part) for part in _HISTOGRAM_PARTS if name.endswith(part)), name) for name in names}


@dataclass(frozen=True)
class CollectedSpan:
    """A span as a collector got it; ids in hexadecimal, times in nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "" of a root
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    service: str
    is_error: bool


class Collector:
    """Keeps what came in, as spans and as the bytes of the requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.raw: list[bytes] = []
        self.spans: list[CollectedSpan] = []

    def take(self, body: bytes) -> None:
        self.raw.append(body)
        for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _attributes(batch.resource.attributes)
            for scope in batch.scope_spans:
                self.spans += [_span(span, resource) for span in scope.spans]

    def named(self, name: str) -> list[CollectedSpan]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}


def _span(span: Any, resource: dict[str, Any]) -> CollectedSpan:
    return CollectedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        service=resource["service.name"],
        is_error=span.status.code == 2,  # STATUS_CODE_ERROR
    )


@dataclass(frozen=True)
class Page:
    """A page as it was on the screen: HTML and picture."""

    html: str
    screenshot: Path

    @property
    def text(self) -> str:
        """The words of the page, without scripts and styles."""
        return _Text.of(self.html)


def chromium_executable() -> str | None:
    """Debian's, or whatever this machine calls it."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def look_at(url: str, screenshot: Path, *, size: tuple[int, int] = (1400, 900), scripts_ms: int = 5_000) -> Page:
    """Open `url` in a new browser and let its scripts run for `scripts_ms` of a clock that goes as fast as it can.

    Answers of servers are waited for whatever the clock says. Raises subprocess.CalledProcessError or TimeoutExpired.
    """
    executable = chromium_executable()
    assert executable is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [executable, *_OPTIONS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
        command += [f"--virtual-time-budget={scripts_ms}", f"--screenshot={screenshot}", "--dump-dom", url]
        done = subprocess.run(command, capture_output=True, check=True, timeout=CHROMIUM_TIMEOUT_S)
    return Page(done.stdout.decode(), screenshot)


class _Text(HTMLParser):
    """Collects text."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden = 0
        self._words: list[str] = []

    @classmethod
    def of(cls, html: str) -> str:
        parser = cls()
        parser.feed(html)
        return " ".join(" ".join(parser._words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._words.append(data)
