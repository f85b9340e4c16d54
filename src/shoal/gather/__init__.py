"""Peers' updates: store, gather, merge, outer update."""

from shoal.gather.codec import dequantize, pack12, quantize, unpack12
from shoal.gather.compress import Compressor, compress, decompress, pseudo_gradient
from shoal.gather.config import GatherConfig
from shoal.gather.container import dump_payload, load_payload, save_payload
from shoal.gather.errors import (
    AlreadyApplied,
    BudgetTooSmall,
    GatherDivergence,
    GatherError,
    ObjectChanged,
    PayloadRejected,
    PlanMismatch,
    RankFailure,
    StoreError,
    UpdateInterrupted,
    fault,
)
from shoal.gather.merge import GatherResult, Manifest, as_partials, merge, merge_reports
from shoal.gather.partial import PartialGatherResult, RankReport
from shoal.gather.payload_ref import PayloadRef
from shoal.gather.plan import GatherPlan, assign, chunk_ranges, select_reserves
from shoal.gather.protocol import agather, gather
from shoal.gather.spec import GradientSpec, ParamSpec, QuantSpec
from shoal.gather.stores import BucketRef, LocalDirStore, MemoryObject, MemoryStore, ObjectInfo, PayloadStore, S3Store
from shoal.gather.validate import PayloadInfo, payload_digest, validate_payload
