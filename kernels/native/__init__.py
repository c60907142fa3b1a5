"""The operations on a CPU in C++, where that is faster than PyTorch; the rest are those of `kernels.cpu`.

`src/` holds the sources, which `kernels.native.build` compiles when the package is installed: one library with the same
kernels for several instruction sets. `kernels.native.library` loads it and says which of these variants the machine can
run; `kernels.native.operations` satisfies `kernels.interface.Operations` with one of them.
"""
