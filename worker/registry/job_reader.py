"""What the registry knows of jobs."""

from __future__ import annotations

import redis

from worker.registry.exchange import perform
from worker.registry.job_queries import JobQueries
from worker.registry.keys import Keys
from worker.registry.result_order import ResultOrder
from worker.registry.result_page import ResultPage
from worker.schemas.job_status import JobStatus
from worker.schemas.worker_info import WorkerInfo


class JobReader:
    """Reads jobs and their records, see JobQueries. Methods raise redis.RedisError when Redis cannot be had."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._queries = JobQueries(keys)

    def status(self, job_id: str) -> JobStatus:
        """The job as it stands. Raises JobNotFound, InvalidJobId."""
        return perform(self._client, self._queries.status(job_id))

    def jobs(self, limit: int) -> list[JobStatus]:
        """The newest `limit` jobs that are not forgotten, newest first."""
        return perform(self._client, self._queries.jobs(limit))

    def page(self, job_id: str, cursor: int, order: ResultOrder) -> ResultPage:
        """Records from `cursor` on. Raises JobNotFound, InvalidJobId."""
        return perform(self._client, self._queries.page(job_id, cursor, order))

    def records(self, job_id: str, cursor: int, limit: int) -> list[bytes]:
        """The records written after the first `cursor`, at most `limit`, in the order they were written."""
        page = perform(self._client, self._queries.page(job_id, cursor, ResultOrder.COMPLETION, limit))
        return list(page.records)

    def workers(self) -> list[WorkerInfo]:
        """Workers whose heartbeat is fresh."""
        return perform(self._client, self._queries.workers())
