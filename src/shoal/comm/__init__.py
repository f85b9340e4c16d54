"""Who am I, and how bytes reach the others."""

from shoal.comm import device_utils, distribution_utils, hvd_lib
from shoal.comm.config import DistributedConfig
from shoal.comm.device_utils import (
    default_device_fn,
    device_rule,
    disable_gpu_training,
    enable_gpu_training,
    get_device_fn,
    get_visible_gpus,
    input_device_fn,
    is_gpu_training,
    maybe_device_if_allowed,
    model_device_fn,
    serving_input_device_fn,
    within_placement_context_of,
)
from shoal.comm.distribution_utils import (
    FLAGS,
    A2aPlan,
    BroadcastGlobalVariablesHook,
    ByteCCLTelemetryHook,
    GPUOptions,
    RunContext,
    SessionConfig,
    SessionRunHook,
    apply_session_config,
    bps_comm_benchmark,
    bps_init,
    byteps_a2a_plan,
    byteps_benchmark_a2a,
    byteps_benchmark_ar,
    enable_sync_training,
    env_int,
    get_device_str,
    get_mpi_local_rank,
    get_mpi_local_size,
    get_mpi_rank,
    get_mpi_size,
    get_sync_run_hooks,
    init_sync_train_and_update_conf,
    is_mpi_mode,
    reset_for_testing,
    sync_train_inited,
    to_torch_device,
    try_init_cuda,
    update_session_config_for_gpu,
)
from shoal.comm.in_process import InProcessTransport
from shoal.comm.mpi import MpiTransport
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
