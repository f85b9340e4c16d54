"""Horovod's and BytePS's calls and environment, for programs that were written with them."""
