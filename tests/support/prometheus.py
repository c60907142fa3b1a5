"""A Prometheus with the configuration of worker/monitor, but for where the workers are."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.free_port import free_port
from tests.support.promql import MONITOR
from tests.support.wait_until import wait_until

START_TIMEOUT_S = 30.0


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
        wait_until(lambda: _is_ready(f"http://{address}"), timeout_s=START_TIMEOUT_S)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=START_TIMEOUT_S)


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
