"""The decoder that the three families share, and how a checkpoint becomes one."""
