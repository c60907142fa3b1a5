"""The threads of a worker process, their start and their end."""
