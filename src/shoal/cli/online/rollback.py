"""`shoal rollback`: return trainer, parameter servers and replicas to an earlier checkpoint."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.cli.shared.arguments import parse
from shoal.cli.shared.console import print_json, print_table
from shoal.errors import UsageError

_ABOUT = """Roll a run back to an earlier checkpoint and push from there.

CONFIG is the file of `shoal train` or `shoal up`. Example, to list checkpoints and exported versions:
  shoal rollback online.toml --list

To return to the newest checkpoint from before the guard ([serve.guard]) stopped the pushes, or to any step:
  shoal rollback online.toml
  shoal rollback online.toml --to 12000

Later checkpoints are moved to a folder before-DATE next to the others; nothing is deleted. Under `shoal up` this
command stops and restarts the trainer. Without `shoal up`, stop the trainer first and start it afterwards: it resumes
from that checkpoint, restores the rows on parameter servers, exports a version and sends every replica the difference.

Samples learnt since that checkpoint are skipped, so that bad ones are not learnt again; --replay reads them again.

Exit codes: 0 success, 1 failed, 2 wrong usage: there is no such checkpoint, or the trainer is running."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of `shoal rollback`."""

    config: Path | None = None
    """The file of `shoal train` or `shoal up`."""
    to: int | None = None
    """The step of the checkpoint; by default the newest one from before the guard stopped the pushes."""
    list: bool = False
    """List checkpoints and exported versions; change nothing."""
    replay: bool = False
    """Read the samples since that checkpoint again."""
    timeout: float = 180.0
    """Seconds to wait for the trainer of `shoal up` to stop and be ready again."""
    json: bool = False
    """Print JSON."""


def main(argv: list[str]) -> int:
    options = parse(Options, argv, "rollback", _ABOUT, positional="config")
    if options.config is None:
        raise UsageError("CONFIG must be given: shoal rollback online.toml")
    from shoal.up.config import load_online

    online = load_online(options.config)
    if options.list:
        return _list(options, online)
    done = _roll_back(options, online)
    if options.json:
        print_json(asdict(done))
        return 0
    plural = "" if len(done.moved) == 1 else "s"
    aside = f"; moved {len(done.moved)} later checkpoint{plural} to {done.aside}" if done.aside else ""
    print(f"rolled back to step {done.step:,}: {done.reason}{aside}")
    return 0


def _roll_back(options: Options, online: Any) -> Any:
    from shoal.train.loop.guard.guard import read_trip
    from shoal.train.loop.guard.rollback import choose, roll_back, saved_steps
    from shoal.up.control import held
    from shoal.up.files import holder

    def now() -> Any:
        return roll_back(online.checkpoints, options.to, replay=options.replay)

    if holder(online.dir) is None:
        return now()
    # Fail here, if at all, before the trainer is stopped.
    choose(saved_steps(online.checkpoints), read_trip(online.checkpoints), options.to)
    with held(online.dir, "trainer", "`shoal rollback`", timeout_s=options.timeout):
        return now()


def _list(options: Options, online: Any) -> int:
    from shoal.serving.export.manifest import Manifest
    from shoal.train.loop.guard.guard import read_trip
    from shoal.train.loop.guard.rollback import saved_steps

    saved, trip = saved_steps(online.checkpoints), read_trip(online.checkpoints)
    versions = []
    folder = Path(online.exports)
    for path in sorted((each for each in folder.glob("*") if each.name.isdecimal()), key=lambda each: int(each.name)):
        manifest = Manifest.read(path)
        versions.append({"version": manifest.version, "step": manifest.global_step, "path": str(path)})
    if options.json:
        print_json({"checkpoints": [asdict(one) for one in saved], "versions": versions,
                    "guard": None if trip is None else asdict(trip)})  # fmt: skip
        return 0
    rows = [
        (os.path.basename(one.path), f"{one.step:,}", f"{one.samples:,}", one.created[:19].replace("T", " "),
         one.damage or ("after the guard" if one.tripped else ""))
        for one in saved
    ]  # fmt: skip
    print_table("", ("checkpoint", "step", "samples", "written (UTC)", "note"), rows)
    print_table("", ("exported version", "step"), [(str(one["version"]), f"{one['step']:,}") for one in versions])
    if trip is not None:
        print(f"the guard stopped pushes at step {trip.step:,}: {trip.reason}", file=sys.stderr)
    return 0
