"""Jobs in, results out: Celery app, Redis registry, producer client, command line."""
