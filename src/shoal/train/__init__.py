"""Data- and pipeline-parallel training pieces."""

from typing import Any

from shoal.comm.config import DistributedConfig
from shoal.comm.hooks import BroadcastGlobalVariablesHook, ByteCCLTelemetryHook, RunContext, SessionRunHook
from shoal.comm.in_process import InProcessTransport
from shoal.comm.process_group import ProcessGroupTransport
from shoal.comm.serialization import deserialize_tensors, serialize_tensors
from shoal.comm.transport import Transport
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
from shoal.train.aggregate import GradientAggregator, LocalAggregator
from shoal.train.all_reduce import AllReduceAggregator
from shoal.train.compressed import CompressedAggregator
from shoal.train.compression import (
    CompressedGradient,
    TopKCompressor,
    compress_gradients,
    decompress_gradients,
    topk_count,
)
from shoal.train.ddp_hooks import TopKState, make_hook, topk_hook
from shoal.train.eof_aware import EofAwareTask
from shoal.train.hierarchical import HierarchicalAggregator
from shoal.train.overlap import OverlappedReducer
from shoal.train.parameter_server import ParameterServer
from shoal.train.pipeline import PipelineRunner, StepOutput
from shoal.train.schedule import (
    PipelineParallelConfig,
    PipelineStage,
    schedule_actions,
    split_by_cost,
    split_into_stages,
)
from shoal.train.sharding import full_tensor, gather_shards, local_shard, shard_module, shard_sizes, shard_tensor
from shoal.train.step import DataParallelConfig, EpochMetrics, distributed_train_step, train_epoch_distributed
from shoal.train.sync_hooks import ChiefSyncHook, SyncHelper, TrainingHooksHelper, WorkerSyncHook
from shoal.train.sync_training_hooks import (
    ReqTimeControlDumpHook,
    SyncTrainingBarrierSaverListener,
    SyncTrainingForceDumpHook,
    SyncTrainingInfoHook,
    SyncTrainingSaverControlHook,
    add_mpi_exception_hook,
)

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


def __getattr__(name: str) -> Any:
    if name == "ParameterSyncHook":  # needs the clients of the layer above, so it is looked up when it is asked for
        from shoal.serving.online import ParameterSyncHook

        return ParameterSyncHook
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
