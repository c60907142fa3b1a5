"""Between text and token ids: tokenizer, chat template, incremental detokenisation and stop strings."""
