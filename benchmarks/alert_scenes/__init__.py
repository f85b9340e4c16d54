"""The scenes of `benchmarks.alerts`: each breaks something real and names the alerts that must fire."""

from collections.abc import Callable
from typing import Any

from benchmarks.alert_scenes import joining, servers, serving, sync, training

SCENES: dict[str, Callable[[Any], None]] = {
    scene.__name__: scene
    for scene in (
        serving.process_down,
        serving.restarts,
        serving.not_ready,
        serving.wrong_requests,
        serving.slow_and_overloaded,
        serving.too_often,
        serving.strangers,
        serving.stale,
        serving.broken_version,
        serving.disagree,
        sync.wrong_address,
        sync.slow_rounds,
        sync.dropped_ids,
        servers.full_disk,
        servers.slow_writes,
        servers.old_checkpoint,
        servers.garbage,
        servers.lost_follower,
        servers.lost_registry,
        servers.frozen_leader,
        servers.lost_archive,
        training.bad_data,
        training.no_data,
        training.old_data,
        training.bad_rows,
        training.full_trainer,
        joining.stopped_streams,
        joining.broken_events,
    )
}
