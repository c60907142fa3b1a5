"""A model directory in Hugging Face's layout: its configuration, its weights and its end-of-sequence ids.

Whatever a file asks for that this engine does not do is a `CheckpointError` naming the key, never ignored.
"""
