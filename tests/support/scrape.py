"""What a worker's /metrics and /healthz say."""

from __future__ import annotations

import json
from http.client import HTTPConnection

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 5.0


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def scrape(port: int) -> dict[str, float]:
    """Every sample: `name` or `name{label="value",...}`, labels in alphabetical order, to its value."""
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
