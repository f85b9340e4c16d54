"""Tables with index and rows in GPU memory: Triton kernels, and the host code that launches them and manages memory."""
