"""The calls and environment of Horovod and BytePS, for programs written against them."""
