"""Where peers' payloads and window artifacts are stored: a directory, S3-compatible buckets, or memory."""

from shoal.gather.stores.base import ObjectInfo, PayloadStore
from shoal.gather.stores.local import LocalDirStore
from shoal.gather.stores.memory import MemoryObject, MemoryStore
from shoal.gather.stores.s3 import BucketRef, S3Store

__all__ = ["BucketRef", "LocalDirStore", "MemoryObject", "MemoryStore", "ObjectInfo", "PayloadStore", "S3Store"]
