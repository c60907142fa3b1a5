"""The model interface: the seeds' verbs over the engine's own KV store."""
