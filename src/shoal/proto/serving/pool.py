"""The private descriptor pool that the generated modules of this package register in."""

from google.protobuf import any_pb2, descriptor_pool, wrappers_pb2

POOL = descriptor_pool.DescriptorPool()
for _file in (any_pb2, wrappers_pb2):
    POOL.AddSerializedFile(_file.DESCRIPTOR.serialized_pb)
