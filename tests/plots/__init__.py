"""Plots of the committed figures in tests/benchmarks/results."""
