"""Tables whose index and rows live in GPU memory: Triton kernels, and the host code that grows and drives them."""
