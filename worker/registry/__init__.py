"""The registry: the truth about every job, in Redis. A Celery message is only a hint to look here."""
