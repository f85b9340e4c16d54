"""The ops' CUDA kernels, in Triton: one module per family of ops, imported on the first call with CUDA tensors.

Every function here has the arguments and the results of the reference beside its op. Indices are checked on the device
before they are used; nothing is read or written out of bounds, and the first bad one is named in the error.
"""
