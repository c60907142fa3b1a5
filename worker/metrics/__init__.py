"""What a worker tells those who run it: its metrics for Prometheus, and whether it takes work (`/healthz`)."""
