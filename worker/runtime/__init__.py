"""The worker process beside Celery: its threads, their start and end, and the plans and shards they run."""
