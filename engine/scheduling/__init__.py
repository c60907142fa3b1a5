"""Decides which tokens of which sequence each step runs. Torch-free."""
