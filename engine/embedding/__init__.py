"""Embeddings: requests for them, pooling, and the engine of an encoder."""
