"""Data- and pipeline-parallel training pieces."""

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
