"""From a plan on the host to tensors, and through the model."""
