"""The ops' CUDA kernels, in Triton: one module per family of ops, imported on the first call with CUDA tensors.

Every function has the arguments and results of its op's reference. Indices are checked on the device before they are
used; nothing is read or written out of bounds, and the error names the first bad one.
"""
