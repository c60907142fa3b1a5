"""From settings and a checkpoint to the parts of an engine."""
