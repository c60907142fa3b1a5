"""A file through an engine in this process."""
