"""Celery's edge: messages out, messages in, and what may not crash a worker."""
