"""`millrace demo`: the main job on one machine, from nothing to results."""
