"""Plans and shards: what is claimed, run and closed."""
