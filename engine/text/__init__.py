"""Turns text into token ids and back: tokenizer, chat template, incremental detokenisation."""
