"""Data- and pipeline-parallel training pieces."""

from shoal.comm.horovod.hooks import BroadcastGlobalVariablesHook, ByteCCLTelemetryHook, RunContext, SessionRunHook
from shoal.comm.launch.config import DistributedConfig
from shoal.comm.ranks.in_process import InProcessTransport
from shoal.comm.ranks.process_group import ProcessGroupTransport
from shoal.comm.ranks.serialization import deserialize_tensors, serialize_tensors
from shoal.comm.ranks.transport import Transport
from shoal.errors import (
    AggregationError,
    CompressionError,
    ConfigError,
    DistributedError,
    PipelineError,
    SerializationError,
    ShapeError,
    StepAborted,
    TransportError,
)
from shoal.lazy import exports
from shoal.train.aggregation.aggregate import GradientAggregator, LocalAggregator
from shoal.train.aggregation.all_reduce import AllReduceAggregator
from shoal.train.aggregation.compressed import CompressedAggregator
from shoal.train.aggregation.compression import (
    CompressedGradient,
    TopKCompressor,
    compress_gradients,
    decompress_gradients,
    topk_count,
)
from shoal.train.aggregation.ddp_hooks import TopKState, make_hook, topk_hook
from shoal.train.aggregation.hierarchical import HierarchicalAggregator
from shoal.train.aggregation.overlap import OverlappedReducer
from shoal.train.aggregation.parameter_server import ParameterServer
from shoal.train.hooks.eof_aware import EofAwareTask
from shoal.train.hooks.sync_hooks import ChiefSyncHook, SyncHelper, TrainingHooksHelper, WorkerSyncHook
from shoal.train.hooks.sync_training_hooks import (
    ReqTimeControlDumpHook,
    SyncTrainingBarrierSaverListener,
    SyncTrainingForceDumpHook,
    SyncTrainingInfoHook,
    SyncTrainingSaverControlHook,
    add_mpi_exception_hook,
)
from shoal.train.pipeline.runner import PipelineRunner, StepOutput
from shoal.train.pipeline.schedule import (
    PipelineParallelConfig,
    PipelineStage,
    schedule_actions,
    split_by_cost,
    split_into_stages,
)
from shoal.train.sharding import full_tensor, gather_shards, local_shard, shard_module, shard_sizes, shard_tensor
from shoal.train.step import DataParallelConfig, EpochMetrics, distributed_train_step, train_epoch_distributed

__all__ = [
    "AggregationError",
    "AllReduceAggregator",
    "BroadcastGlobalVariablesHook",
    "ByteCCLTelemetryHook",
    "ChiefSyncHook",
    "CompressedAggregator",
    "CompressedGradient",
    "CompressionError",
    "ConfigError",
    "DataParallelConfig",
    "DistributedConfig",
    "DistributedError",
    "EofAwareTask",
    "EpochMetrics",
    "GradientAggregator",
    "HierarchicalAggregator",
    "InProcessTransport",
    "LocalAggregator",
    "OverlappedReducer",
    "ParameterServer",
    "PipelineError",
    "PipelineParallelConfig",
    "PipelineRunner",
    "PipelineStage",
    "ProcessGroupTransport",
    "ReqTimeControlDumpHook",
    "RunContext",
    "SerializationError",
    "SessionRunHook",
    "ShapeError",
    "StepAborted",
    "StepOutput",
    "SyncHelper",
    "SyncTrainingBarrierSaverListener",
    "SyncTrainingForceDumpHook",
    "SyncTrainingInfoHook",
    "SyncTrainingSaverControlHook",
    "TopKCompressor",
    "TopKState",
    "TrainingHooksHelper",
    "Transport",
    "TransportError",
    "WorkerSyncHook",
    "add_mpi_exception_hook",
    "compress_gradients",
    "decompress_gradients",
    "deserialize_tensors",
    "distributed_train_step",
    "full_tensor",
    "gather_shards",
    "local_shard",
    "make_hook",
    "schedule_actions",
    "serialize_tensors",
    "shard_module",
    "shard_sizes",
    "shard_tensor",
    "split_by_cost",
    "split_into_stages",
    "topk_count",
    "topk_hook",
    "train_epoch_distributed",
]


# The loop behind `shoal train` imports everything else, and the hook that pushes rows needs the serving clients.
_LAZY, __getattr__, _ = exports(
    __name__,
    {
        "shoal.serving.sync.online": ("ParameterSyncHook",),
        "shoal.train.loop.config": ("Config",),
        "shoal.train.loop.toml": ("load_config",),
        "shoal.train.loop.trainer": ("Trainer",),
    },
)
