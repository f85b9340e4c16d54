"""Who am I, and how bytes reach the others."""

from shoal.comm.config import DistributedConfig
from shoal.comm.in_process import InProcessTransport
from shoal.comm.mpi import MpiTransport
from shoal.comm.process_group import ProcessGroupTransport
from shoal.comm.serialization import deserialize_tensors, serialize_tensors
from shoal.comm.transport import Transport
