"""The Triton kernels of GPU tables."""
