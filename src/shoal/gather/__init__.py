"""Peers' updates: store, gather, merge, outer update."""

from shoal.errors import ConfigError
from shoal.gather.artifact.reader import ArtifactReader
from shoal.gather.artifact.writer import write_artifact
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
from shoal.gather.metrics import param_norms, quality_metrics
from shoal.gather.payload.codec import dequantize, pack12, quantize, unpack12
from shoal.gather.payload.compress import Compressor, compress, decompress, pseudo_gradient
from shoal.gather.payload.container import dump_payload, load_payload, save_payload
from shoal.gather.payload.overlap import (
    SEVERITY_MULTIPLIERS,
    OverlapReport,
    index_overlap,
    overlap_severity,
    overlap_signature,
)
from shoal.gather.payload.payload_ref import PayloadRef
from shoal.gather.payload.spec import GradientSpec, ParamSpec, QuantSpec
from shoal.gather.payload.validate import PayloadInfo, payload_digest, validate_payload
from shoal.gather.protocol.gather import agather, gather
from shoal.gather.protocol.merge import GatherResult, Manifest, as_partials, merge, merge_reports
from shoal.gather.protocol.partial import PartialGatherResult, RankReport
from shoal.gather.protocol.plan import GatherConfig, GatherPlan, assign, chunk_ranges, select_reserves
from shoal.gather.protocol.window import WindowReport, run_window
from shoal.gather.stores import BucketRef, LocalDirStore, MemoryObject, MemoryStore, ObjectInfo, PayloadStore, S3Store
from shoal.gather.update.outer import UpdateReport, outer_update
from shoal.gather.update.tiles import TilePlan, UpdateLedger, clip_factors, tile_plan

__all__ = [
    "SEVERITY_MULTIPLIERS",
    "AlreadyApplied",
    "ArtifactReader",
    "BucketRef",
    "BudgetTooSmall",
    "Compressor",
    "ConfigError",
    "GatherConfig",
    "GatherDivergence",
    "GatherError",
    "GatherPlan",
    "GatherResult",
    "GradientSpec",
    "LocalDirStore",
    "Manifest",
    "MemoryObject",
    "MemoryStore",
    "ObjectChanged",
    "ObjectInfo",
    "OverlapReport",
    "ParamSpec",
    "PartialGatherResult",
    "PayloadInfo",
    "PayloadRef",
    "PayloadRejected",
    "PayloadStore",
    "PlanMismatch",
    "QuantSpec",
    "RankFailure",
    "RankReport",
    "S3Store",
    "StoreError",
    "TilePlan",
    "UpdateInterrupted",
    "UpdateLedger",
    "UpdateReport",
    "WindowReport",
    "agather",
    "as_partials",
    "assign",
    "chunk_ranges",
    "clip_factors",
    "compress",
    "decompress",
    "dequantize",
    "dump_payload",
    "fault",
    "gather",
    "index_overlap",
    "load_payload",
    "merge",
    "merge_reports",
    "outer_update",
    "overlap_severity",
    "overlap_signature",
    "pack12",
    "param_norms",
    "payload_digest",
    "pseudo_gradient",
    "quality_metrics",
    "quantize",
    "run_window",
    "save_payload",
    "select_reserves",
    "tile_plan",
    "unpack12",
    "validate_payload",
    "write_artifact",
]
