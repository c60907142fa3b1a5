"""`millrace serve`: OpenAI's Files and Batches API over HTTP. One more producer, without a state of its own."""
