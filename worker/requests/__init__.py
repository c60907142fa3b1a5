"""From request lines to the engine, and from its outputs to records."""
