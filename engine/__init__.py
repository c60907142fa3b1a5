"""Prompts in, tokens out. Knows no Redis and no Celery. Start at `engine.engine.Engine`.

A prompt's way: `Engine.add_request` -> `Scheduler.schedule` (BlockManager) -> `ModelRunner.launch`, that is
`StepExecutor.execute` (`plan_batch`, `DecoderModel.forward`, kernels), `Sampler` and one copy back (`DeviceStream`) ->
`ModelRunner.collect` -> `OutputProcessor` -> `RequestOutput`. With engine.async_scheduling the next step is launched
before one is collected.

Embeddings (`EmbeddingRequest`) go the same way up to the hidden states, which `EmbeddingRequests` pools; an encoder has
an engine of its own (`EncoderEngine`). `load_engine` makes the one that a checkpoint needs.

This file imports nothing, so that the bookkeeping (scheduler, blocks, requests) is used and tested without torch.
"""
