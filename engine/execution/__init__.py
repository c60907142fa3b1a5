"""Runs forward passes: plans a batch on the host, brings it to the device and through the model."""
