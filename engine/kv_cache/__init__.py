"""Bookkeeping of the paged KV cache. Torch-free, but for `tensors`."""
