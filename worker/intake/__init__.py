"""Lines on their way into the registry."""
