"""The public names, for type checkers and for `shoal.lazy`, which imports each on first use."""

from shoal.background.queue import EndOfInput as EndOfInput
from shoal.ops.sharding import ShardedFids as ShardedFids
from shoal.ops.sharding import sharding_sparse_fids as sharding_sparse_fids
from shoal.proto.example_pb2 import Example as Example
from shoal.proto.example_pb2 import ExampleBatch as ExampleBatch
from shoal.proto.example_pb2 import Feature as Feature
from shoal.proto.example_pb2 import FidList as FidList
from shoal.proto.example_pb2 import NamedFeature as NamedFeature
from shoal.proto.example_pb2 import NamedFeatureList as NamedFeatureList
from shoal.proto.feature_configs import FeatureConfig as FeatureConfig
from shoal.proto.feature_configs import FeatureConfigs as FeatureConfigs
from shoal.proto.feature_configs import OutConfig as OutConfig
from shoal.proto.feature_configs import OutType as OutType
from shoal.proto.feature_configs import PoolingType as PoolingType
from shoal.proto.feature_configs import SliceConfig as SliceConfig
from shoal.proto.feature_configs import TensorShape as TensorShape
from shoal.proto.instance_pb2 import Instance as Instance
from shoal.sharded.all_to_all.backend import AllToAll as AllToAll
from shoal.sharded.all_to_all.backend import ProcessGroup as ProcessGroup
from shoal.sharded.all_to_all.backend import SingleRank as SingleRank
from shoal.sharded.all_to_all.metrics import flags as flags
from shoal.sharded.all_to_all.metrics import set_alltoall_writer as set_alltoall_writer
from shoal.sharded.all_to_all.table import AllToAllHashTable as AllToAllHashTable
from shoal.sharded.all_to_all.ways import Way as Way
from shoal.sharded.distributed_table import DistributedHashTable as DistributedHashTable
from shoal.sharded.environment import SyncEnvironment as SyncEnvironment
from shoal.sharded.export import set_remote_predict as set_remote_predict
from shoal.sharded.metrics import set_lookup_metrics as set_lookup_metrics
from shoal.sharded.monolith.clip import GradClipType as GradClipType
from shoal.sharded.monolith.distributed_ps import DistributedMultiTypeHashTable as DistributedMultiTypeHashTable
from shoal.sharded.monolith.distributed_ps_factory import (
    create_in_worker_multi_type_hash_table as create_in_worker_multi_type_hash_table,
)
from shoal.sharded.monolith.distributed_ps_factory import (
    create_in_worker_native_multi_hash_table as create_in_worker_native_multi_hash_table,
)
from shoal.sharded.monolith.distributed_ps_factory import create_multi_type_hash_table as create_multi_type_hash_table
from shoal.sharded.monolith.distributed_ps_factory import (
    create_native_multi_hash_table as create_native_multi_hash_table,
)
from shoal.sharded.monolith.distributed_ps_factory import create_partitioned_hash_table as create_partitioned_hash_table
from shoal.sharded.monolith.distributed_ps_sync import (
    DistributedMultiTypeHashTableMpi as DistributedMultiTypeHashTableMpi,
)
from shoal.sharded.monolith.distributed_ps_sync import early_reorder_pack as early_reorder_pack
from shoal.sharded.monolith.feature_utils import apply_gradients as apply_gradients
from shoal.sharded.monolith.feature_utils import (
    apply_gradients_with_var_optimizer as apply_gradients_with_var_optimizer,
)
from shoal.sharded.monolith.feature_utils import control_ops as control_ops
from shoal.sharded.monolith.feature_utils import dense_opt_ops as dense_opt_ops
from shoal.sharded.monolith.layout_config import ParserCtx as ParserCtx
from shoal.sharded.monolith.layout_config import ShardingSparseFidsOpParams as ShardingSparseFidsOpParams
from shoal.sharded.monolith.layout_config import gen_feature_configs as gen_feature_configs
from shoal.sharded.monolith.layout_config import get_default_parser_ctx as get_default_parser_ctx
from shoal.sharded.monolith.layout_config import sharding_sparse_fids_with_context as sharding_sparse_fids_with_context
from shoal.sharded.monolith.packing import pack_tensors as pack_tensors
from shoal.sharded.monolith.packing import pack_typed_keyed_tensors as pack_typed_keyed_tensors
from shoal.sharded.monolith.packing import unpack_packed_tensors as unpack_packed_tensors
from shoal.sharded.monolith.packing import unpack_tensors as unpack_tensors
from shoal.sharded.monolith.partitioned import PartitionedHashTable as PartitionedHashTable
from shoal.sharded.monolith.prefetch_queue import AsyncFunctionMgr as AsyncFunctionMgr
from shoal.sharded.monolith.prefetch_queue import AsyncPushHook as AsyncPushHook
from shoal.sharded.monolith.prefetch_queue import EnqueueHook as EnqueueHook
from shoal.sharded.monolith.prefetch_queue import Stage as Stage
from shoal.sharded.monolith.prefetch_queue import StructureQueue as StructureQueue
from shoal.sharded.monolith.prefetch_queue import enqueue_dicts_with_queue_return as enqueue_dicts_with_queue_return
from shoal.sharded.monolith.table_pipeline import Looked as Looked
from shoal.sharded.monolith.table_pipeline import TablePipeline as TablePipeline
from shoal.sharded.placement.costs import Costs as Costs
from shoal.sharded.placement.loads import loads_of as loads_of
from shoal.sharded.placement.model import Links as Links
from shoal.sharded.placement.model import TableLoad as TableLoad
from shoal.sharded.placement.plan import Plan as Plan
from shoal.sharded.placement.planner import PlanError as PlanError
from shoal.sharded.placement.planner import plan as plan
from shoal.sharded.placement.shard import shard as shard
from shoal.sharded.ps.client.client import PsClient as PsClient
from shoal.sharded.ps.client.remote import RemoteHashTable as RemoteHashTable
from shoal.sharded.ps.client.remote import RemoteMultiHashTable as RemoteMultiHashTable
from shoal.sharded.ps.client.remote import RemoteMultiTypeHashTable as RemoteMultiTypeHashTable
from shoal.sharded.ps.client.tables import load_tables as load_tables
from shoal.sharded.ps.client.tables import ps_table as ps_table
from shoal.sharded.ps.limits import Limits as Limits
from shoal.sharded.ps.reshard import load_shard as load_shard
from shoal.sharded.ps.reshard import reshard_servers as reshard_servers
from shoal.sharded.ps.security import ClientKeys as ClientKeys
from shoal.sharded.ps.security import ServerKeys as ServerKeys
from shoal.sharded.ps.server.engine import Durability as Durability
from shoal.sharded.ps.server.engine import Engine as Engine
from shoal.sharded.ps.server.server import ParameterServer as ParameterServer
from shoal.sharded.ps.server.shard import Shard as Shard
from shoal.sharded.summary import set_summary_writer as set_summary_writer
from shoal.table.export_mode import ExportContext as ExportContext
from shoal.table.export_mode import ExportMode as ExportMode
from shoal.table.export_mode import enter_export_mode as enter_export_mode
from shoal.table.export_mode import get_current_export_ctx as get_current_export_ctx
from shoal.table.export_mode import is_exporting as is_exporting
from shoal.table.export_mode import is_exporting_distributed as is_exporting_distributed
from shoal.table.export_mode import is_exporting_standalone as is_exporting_standalone
from shoal.table.merged import MergedMultiTypeHashTable as MergedMultiTypeHashTable
