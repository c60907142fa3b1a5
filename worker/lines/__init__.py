"""Request lines: what a job's JSONL may hold, and what is wrong with a bad line.

Imports neither torch nor the engine, so that a producer can check its lines before it submits them.
"""
