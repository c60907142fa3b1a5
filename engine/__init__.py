"""Prompts in, tokens out. Knows no Redis and no Celery. Start at `engine.engine.Engine`.

A prompt's way: `Engine.add_request` -> `Scheduler.schedule` (BlockManager) -> `build_forward_batch` ->
`StepExecutor.execute` -> `DecoderModel.forward` -> kernels -> `Sampler` -> `OutputProcessor` -> `RequestOutput`.

This file imports nothing, so that the bookkeeping (scheduler, blocks, requests) is used and tested without torch.
"""
