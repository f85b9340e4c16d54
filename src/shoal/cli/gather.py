"""`shoal gather`: run a window, inspect its files, replay it, or simulate one with synthetic peers."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from shoal.cli.gather_simulate import Simulate, simulate
from shoal.cli.shared.arguments import Verbs, run_verb
from shoal.cli.shared.console import print_json, print_table
from shoal.errors import ConfigError

EXAMPLE = """examples:
  shoal gather simulate --peers 16 --worlds 1 2 4 --plot out/gather.png
  shoal gather run --store peers/ --window 7 --peers 0-15 --reserves 16,17 --model spec.json
  torchrun --nproc-per-node 4 -m shoal gather run --store 's3://peer-{uid}?endpoint=http://host:9000' ...
  shoal gather inspect peers/aggregator-7-v0.pga

exit codes: 0 applied, or success, 1 failed, 2 wrong usage or configuration, 3 skipped"""
EXIT_SKIPPED = 3


@dataclass(kw_only=True)
class Run:
    """Gather a window and apply it, as a single process or as one rank under torchrun.

    Example: shoal gather run --store peers/ --window 7 --peers 0-15 --reserves 16,17 --model spec.json
    """

    store: str
    """A directory, or s3://BUCKET containing {uid}, with ?endpoint=&region=&artifacts=; credentials come from AWS_*."""
    window: int
    """Number of the window."""
    peers: str
    """UIDs, such as 1,5,8-12."""
    model: Path
    """The gradient spec as JSON (GradientSpec.to_json)."""
    reserves: str = ""
    """UIDs that replace peers whose payload is missing or invalid."""
    weights: Path | None = None
    """safetensors file with the model's parameters; without it they are zeros, and --save writes minus the update."""
    save: Path | None = None
    """File for the new parameters, as safetensors."""
    version: str = "0"
    """Version in the names of payloads and of the artifact."""
    time_min: int | None = None
    """Earliest upload time accepted, in microseconds since the epoch."""
    time_max: int | None = None
    """Latest upload time accepted, in microseconds since the epoch."""
    timeout_s: float = 90.0
    """Seconds for one round of fetches."""
    lr: float = 1.0
    """Learning rate of the outer update."""
    momentum: float = 0.0
    """Nesterov momentum of the outer update; 0 for none."""
    budget_mib: int = 1024
    """Memory budget of the outer update."""
    overlap_threshold: float = 0.4
    """Overlap of two peers' updates at or above which the later one is flagged."""
    min_peers: int = 1
    """Skip the window if fewer peers are accepted."""
    spill_dir: Path | None = None
    """Folder that keeps spilled payloads for a restart; by default a temporary one."""
    no_artifact: bool = False
    """Do not store the merged artifact."""
    json: bool = False
    """Print the report as JSON."""


@dataclass(kw_only=True)
class Inspect:
    """Show the contents of an artifact or a payload; with --model, also validate a payload.

    Example: shoal gather inspect peers/aggregator-7-v0.pga
    """

    path: Path
    """The artifact or payload."""
    model: Path | None = None
    """The gradient spec as JSON, to validate a payload against."""
    json: bool = False
    """Print JSON."""


@dataclass(kw_only=True)
class Replay:
    """Apply an artifact again and print the hash of the update.

    Example: shoal gather replay peers/aggregator-7-v0.pga --model spec.json
    """

    artifact: Path
    """The artifact of a window."""
    model: Path | None = None
    """The gradient spec as JSON; by default the artifact's own."""
    weights: Path | None = None
    """safetensors file with the model's parameters; without it they are zeros."""
    save: Path | None = None
    """File for the new parameters, as safetensors."""
    expect: str = ""
    """The expected update hash; the exit code is 1 if it differs."""
    lr: float = 1.0
    """Learning rate of the outer update."""
    budget_mib: int = 1024
    """Memory budget of the outer update."""
    json: bool = False
    """Print JSON."""


def main(argv: list[str]) -> int:
    """Run the verb that ``argv`` names."""
    verbs: Verbs = {
        "run": (Run, run, ()),
        "inspect": (Inspect, inspect, ("path",)),
        "replay": (Replay, replay, ("artifact",)),
        "simulate": (Simulate, simulate, ()),
    }
    return run_verb("gather", EXAMPLE, verbs, argv)


def parse_uids(text: str) -> list[int]:
    """Parse ``1,5,8-12`` to a list."""
    uids: list[int] = []
    for part in filter(None, text.replace(" ", "").split(",")):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"peers must be numbers and ranges like 1,5,8-12, got {part!r}")
        if dash and int(last) < int(first):
            raise ConfigError(f"a range of peers must be ascending, got {part!r}")
        uids += range(int(first), int(last or first) + 1)
    return uids


def open_store(url: str, uids: list[int]) -> Any:
    """Open a directory, or one bucket per peer."""
    from shoal.gather import BucketRef, LocalDirStore, S3Store

    if not url.startswith("s3://"):
        if not Path(url).is_dir():
            raise ConfigError(f"--store {url}: there is no such directory")
        return LocalDirStore(url)
    parsed = urlparse(url)
    options = {name: values[-1] for name, values in parse_qs(parsed.query).items()}
    if unknown := sorted(set(options) - {"endpoint", "region", "artifacts"}):
        raise ConfigError(f"--store {url}: unknown option(s) {', '.join(unknown)}")
    if "{uid}" not in parsed.netloc:
        raise ConfigError(f"--store {url}: the bucket's name must contain {{uid}}, as in s3://peer-{{uid}}")
    keys = {
        "access_key_id": os.environ.get("AWS_ACCESS_KEY_ID"),
        "secret_access_key": os.environ.get("AWS_SECRET_ACCESS_KEY"),
        "session_token": os.environ.get("AWS_SESSION_TOKEN"),
    }
    where = {"endpoint": options.get("endpoint"), "region": options.get("region", "us-east-1"),
             "prefix": parsed.path.strip("/")}  # fmt: skip
    refs = {uid: BucketRef(parsed.netloc.replace("{uid}", str(uid)), **where, **keys) for uid in uids}
    artifacts = BucketRef(options["artifacts"], **where, **keys) if "artifacts" in options else None
    return S3Store(refs, artifacts)


def _read_spec(path: Path) -> Any:
    from shoal.gather import GradientSpec

    try:
        return GradientSpec.from_json(path.read_text())
    except OSError as error:
        raise ConfigError(f"--model {path}: {error.strerror}") from None
    except ValueError as error:  # bytes that are not text, or text that is not a spec
        raise ConfigError(f"--model {path}: {error}") from None


def _model(spec: Any, weights: Path | None) -> Any:
    import torch

    from shoal.gather import load_payload

    found = load_payload(weights, spec)["state_dict"] if weights is not None else {}

    class Weights(torch.nn.Module):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return iter(values.items())

        def parameters(self, recurse: bool = True) -> Any:
            return iter(values.values())

    values = {}
    for p in spec.params:
        tensor = found.get(p.name, torch.zeros(p.shape, device="cpu"))
        if tuple(tensor.shape) != p.shape:
            raise ConfigError(f"--weights: {p.name!r} has shape {tuple(tensor.shape)}, the spec has {p.shape}")
        values[p.name] = torch.nn.Parameter(tensor.clone())
    return Weights()


def _save(model: Any, path: Path | None) -> None:
    from shoal.gather import save_payload

    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_payload({"state_dict": {name: p.detach() for name, p in model.named_parameters()}}, path)


def _group() -> tuple[Any, int]:
    """Return torchrun's group, or None for a single process, and this process's rank."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return None, 0
    from shoal.comm.ranks import collectives

    if not collectives.is_started():
        collectives.start("gloo")
    return collectives.group_of(), collectives.rank_in()


def _show(title: str, values: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(values)
    else:
        print_table(title, ("name", "value"), [(name, str(value)) for name, value in values.items()], left=2)


def run(args: Run) -> int:
    import torch

    from shoal.gather import GatherConfig, GatherPlan, run_window

    spec, uids, reserves = _read_spec(args.model), parse_uids(args.peers), parse_uids(args.reserves)
    plan = GatherPlan(args.window, uids, reserves, args.time_min, args.time_max, args.timeout_s, args.version)
    store = open_store(args.store, [*uids, *reserves])
    group, rank = _group()
    model = _model(spec, args.weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, nesterov=args.momentum > 0)
    config = GatherConfig(min_peers=args.min_peers, spill_dir=args.spill_dir)
    report = run_window(
        model, optimizer, plan, spec=spec, store=store, group=group, config=config,
        overlap_threshold=args.overlap_threshold, budget_bytes=args.budget_mib << 20,
        emit_artifact=not args.no_artifact,
    )  # fmt: skip
    record, result, update = report.record, report.result, report.update
    assert result is not None
    assert update is not None
    print(
        f"rank {rank}: {record['accepted']} of {record['assigned']} peers, {record['bytes']} bytes, "
        f"fetch {record['fetch_s']:.2f} s, validate {record['validate_s']:.2f} s", file=sys.stderr,
    )  # fmt: skip
    if report.upload is not None and not report.upload.wait(60):
        print(f"rank {rank}: the artifact was not uploaded ({report.upload.failures} failures)", file=sys.stderr)
    if rank == 0:
        _save(model, args.save)
        overlap = report.overlap
        summary = {
            "decision": report.decision,
            "accepted": result.uids,
            "skipped": result.skip_reasons,
            "reserve used": result.reserve_used_uids,
            "success rate": round(result.success_rate, 4),
            "overlap mean / max": None
            if overlap is None
            else [round(overlap.mean_overlap, 4), round(overlap.max_overlap, 4)],
            "flagged": {} if overlap is None else overlap.uids_over_thresh,
            "update l2": update.global_l2_norm,
            "update hash": update.update_hash,
            "peak / budget bytes": [update.peak_bytes, args.budget_mib << 20],
            "artifact sha256": report.artifact_sha256,
            "unready": report.unready,
            "seconds": {k: round(v, 4) for k, v in record.items() if k.endswith("_s")},
        }
        _show(f"window {args.window}", summary, as_json=args.json)
    if group is not None:
        from shoal.comm.ranks import collectives

        collectives.stop()
    return 0 if report.decision == "APPLY" else EXIT_SKIPPED


def inspect(args: Inspect) -> int:
    from shoal.gather import ArtifactReader, GradientSpec, PayloadRejected, load_payload, validate_payload

    try:
        with open(args.path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ConfigError(f"{args.path}: {error.strerror}") from None
    if magic == b"PGA1":
        reader = ArtifactReader(args.path)
        rows: dict[str, Any] = {
            "window": reader.window,
            "version": reader.version,
            "spec hash": reader.spec_hash,
            "parameters": len(reader.params),
            "accepted": reader.uids,
            "global steps": reader.global_steps,
            "skipped": reader.skip_reasons,
            "success rate": round(reader.success_rate, 4),
            "digests": reader.digests,
        }
    else:
        spec = _read_spec(args.model) if args.model is not None else GradientSpec(())
        try:
            payload = load_payload(args.path, spec)
            rows = {
                "global step": payload.get("global_step", 0),
                "metadata": payload.get("metadata", {}),
                "tensors": {
                    k: [str(v.dtype), list(v.shape)] for k, v in payload["state_dict"].items() if hasattr(v, "shape")
                },
            }
            if args.model is not None:
                info = validate_payload(payload, spec)
                norms = {p.name: round(float(n), 6) for p, n in zip(spec.params, info.norms, strict=True)}
                rows |= {"valid": True, "digest": info.digest, "bytes": info.download_bytes, "norms": norms}
        except PayloadRejected as error:
            rows = {"valid": False, "reason": error.reason, "detail": error.detail}
    _show(str(args.path), rows, as_json=args.json)
    return 0 if rows.get("valid", True) else 1


def replay(args: Replay) -> int:
    import torch

    from shoal.gather import ArtifactReader, outer_update

    if not args.artifact.exists():
        raise ConfigError(f"{args.artifact}: there is no such file")
    reader = ArtifactReader(args.artifact)
    spec = _read_spec(args.model) if args.model is not None else reader.spec
    model = _model(spec, args.weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    report = outer_update(model, optimizer, reader, spec=spec, budget_bytes=args.budget_mib << 20)
    _save(model, args.save)
    rows = {
        "window": report.window,
        "decision": report.decision,
        "update hash": report.update_hash,
        "update l2": report.global_l2_norm,
        "applied": len(report.applied_params),
        "skipped": report.skipped_params,
        "peak bytes": report.peak_bytes,
    }
    _show(str(args.artifact), rows, as_json=args.json)
    if args.expect and args.expect != report.update_hash:
        print(f"shoal gather: the update hash is {report.update_hash}, expected {args.expect}", file=sys.stderr)
        return 1
    return 0 if report.decision == "APPLY" else EXIT_SKIPPED
