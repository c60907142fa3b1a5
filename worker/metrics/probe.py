"""`python -m worker.metrics.probe [URL]`: exit 0 if the worker beside it takes work, else 1 with the reasons.

Without a URL it asks at the address in this process' settings (MILLRACE_METRICS__PORT, ...). It is a health check for
the worker's container, without curl.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

TIMEOUT_S = 5.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main(arguments: Sequence[str]) -> int:
    """The exit code. Says on standard error why it is not 0."""
    try:
        host, port = _address(arguments)
        reasons = ask(host, port)
    except (OSError, HTTPException, ValueError) as error:  # of settings: SettingsError is a ValueError
        reasons = [f"{type(error).__name__}: {error}"]
    for reason in reasons:
        sys.stderr.write(f"{reason}\n")
    return 1 if reasons else 0


def ask(host: str, port: int) -> list[str]:
    """Why the worker there takes no work; empty if it does. Raises OSError, HTTPException, ValueError."""
    connection = HTTPConnection(host, port, timeout=TIMEOUT_S)  # unlike urllib it ignores proxies of the environment
    try:
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        body = json.loads(response.read())
        if response.status == 200:
            return []
        return [str(reason) for reason in body["reasons"]] or [f"status {response.status}"]
    finally:
        connection.close()


def _address(arguments: Sequence[str]) -> tuple[str, int]:
    if arguments:
        url = urlsplit(arguments[0])
        if url.hostname is None or url.port is None:
            raise ValueError(f"{arguments[0]!r} names no host and port; accepted: http://HOST:PORT")
        return url.hostname, url.port
    from settings import load_settings  # noqa: PLC0415  # takes 0.3 s of a core each time, which a URL saves

    metrics = load_settings().settings.metrics
    if metrics.port is None:
        raise ValueError("metrics.port is none: the worker tells nobody how it is; set MILLRACE_METRICS__PORT")
    return _ANY_ADDRESS.get(metrics.host, metrics.host), metrics.port


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
