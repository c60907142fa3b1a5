"""Tensor operations: one interface (`kernels.interface.Operations`), implementations `cpu`, `triton` and `reference`.

This file stays a docstring: Hugging Face publishes a package of the same name and transformers imports
whatever it finds under it (research: transformers 5.23 `_is_package_available`).
"""
