"""The protobuf messages of tables, under the names that users import from `shoal.table`."""

from shoal.proto.ckpt_info_pb2 import *
from shoal.proto.embedding_hash_table_pb2 import *
from shoal.proto.float_compressor_pb2 import *
from shoal.proto.hash_table_pb2 import *
from shoal.proto.initializer_pb2 import *
from shoal.proto.optimizer_pb2 import *
