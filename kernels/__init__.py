"""Tensor operations of the models: one interface, `kernels.interface.Operations`, and a package per implementation.

This file stays a docstring: Hugging Face publishes a package of the same name, and transformers imports whatever it
finds under it (transformers 5.23, `_is_package_available`).
"""
