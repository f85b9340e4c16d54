"""Tables that span processes: parameter servers, all-to-all, partitioned layouts, and the queues around them."""

from importlib import import_module
from typing import Any

# Module -> the public names that live in it; imported on first use.
_PUBLIC: dict[str, tuple[str, ...]] = {
    "shoal.sharded.distributed_ps": ("DistributedHashTable", "DistributedMultiTypeHashTable"),
    "shoal.sharded.export": ("set_remote_predict",),
    "shoal.sharded.metrics": ("set_lookup_metrics",),
    "shoal.sharded.ps.client": ("PsClient",),
    "shoal.sharded.ps.engine": ("Durability", "Engine"),
    "shoal.sharded.ps.remote": ("RemoteHashTable", "RemoteMultiHashTable", "RemoteMultiTypeHashTable"),
    "shoal.sharded.ps.security": ("ClientKeys", "ServerKeys"),
    "shoal.sharded.ps.server": ("Limits", "ParameterServer"),
    "shoal.sharded.ps.shard": ("Shard",),
    "shoal.table.export_mode": (
        "ExportContext",
        "ExportMode",
        "enter_export_mode",
        "get_current_export_ctx",
        "is_exporting",
        "is_exporting_distributed",
        "is_exporting_standalone",
    ),
}
_WHERE = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shoal.sharded' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
