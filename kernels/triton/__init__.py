"""The operations in Triton, for CUDA tensors. Satisfies `kernels.interface.Operations`."""
