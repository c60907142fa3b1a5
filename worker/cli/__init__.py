"""The `millrace` command. Data goes to stdout or files, progress and logs to stderr."""
