"""The paged KV cache: its bookkeeping, torch-free, and in `tensors` its memory."""
