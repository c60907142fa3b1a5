"""Makes an engine out of settings and a checkpoint."""
