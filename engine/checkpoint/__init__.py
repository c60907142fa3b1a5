"""A model directory in Hugging Face's layout: its configuration, its weights and its end-of-sequence ids.

A key that asks for what this engine does not do is never ignored: `CheckpointError` names it.
"""
