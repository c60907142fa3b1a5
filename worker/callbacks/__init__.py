"""Tells whoever a job names that it has ended: by HTTP, signed, or by a Celery task."""
