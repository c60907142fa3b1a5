"""Trains the demo's model from nothing: `python -m tests.demo_model --out DIR`."""
