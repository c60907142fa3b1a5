"""compose.yaml with real containers; needs a Docker daemon and Compose, run by `make test-compose`.

base_images.sh makes the base images without a registry.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import redis
import trustme

from tests.compose.__main__ import millrace_project, walk
from tests.compose.compose_project import NoCompose, Producer, Transcript, find_compose
from tests.support.redis_servers import free_port

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2400)]


@pytest.fixture(autouse=True)
def _compose() -> None:
    try:
        find_compose()
    except NoCompose as error:
        pytest.skip(str(error))


def test_up_a_job_killed_workers_the_job_done_down(tmp_path: Path) -> None:
    walk(tmp_path, Transcript(sys.stdout))


def test_encrypted_redis_serves_worker_and_producer_and_none_in_the_clear(tmp_path: Path) -> None:
    tls = tmp_path / "tls"
    tls.mkdir()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tls / "ca.crt")
    certificate = authority.issue_cert("redis", "localhost")
    certificate.cert_chain_pems[0].write_to_path(tls / "redis.crt")
    certificate.private_key_pem.write_to_path(tls / "redis.key")
    plain, encrypted = free_port(), free_port()
    environment = {"REDIS_PORT": str(plain), "REDIS_TLS_PORT": str(encrypted), "TLS_DIR": str(tls)}
    with millrace_project(environment, "worker/compose.tls.yaml") as project:
        project.build()
        project.run("up", "-d")
        url = f"rediss://millrace-producer@localhost:{encrypted}/0"
        lines = [{"prompt": f"Hello {number}", "temperature": 0} for number in range(5)]
        producer = Producer(tls, url, project.secret("producer"), lines)
        assert len(producer.results(producer.submit())) == len(lines)
        for port in (plain, encrypted):
            with redis.Redis(port=port) as nobody, pytest.raises(redis.ConnectionError):
                nobody.ping()
