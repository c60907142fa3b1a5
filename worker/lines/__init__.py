"""Request lines: what a job's JSONL may hold, and what is wrong with a line that does not.

Pure: neither torch nor the engine is imported, so that a producer can check its lines before it submits them.
"""
