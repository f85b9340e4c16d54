"""`shoal launch`: start N ranks with torchrun's agent, and prefix every output line with its rank.

When a rank fails, the others are stopped. With restarts left, all ranks start again and a line gives the reason;
otherwise the last output lines of the first failure are printed at the end. Ctrl-C stops all ranks.
"""

import argparse
import contextlib
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

TAIL_LINES = 40

EXAMPLES = """examples:
  shoal launch -n 2 train.py --enable_sync_training
  shoal launch -n 4 -m shoal bench comm
  shoal launch -n 4 --max-restarts 10 -m shoal train ctr.toml
  shoal launch -n 8 --nnodes 2:4 --rdzv-endpoint host0:29400 --allow-insecure -m shoal train ctr.toml  # on each host
"""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="shoal launch",
        description="Start N ranks of a Python script on this machine or, with --nnodes, on several. With "
        "--max-restarts all ranks start again when one dies; `shoal train` then resumes from its last checkpoint.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", "--nproc", type=int, default=2, help="number of ranks to start (2)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N",
        help="when a rank fails, start all ranks again, at most this many times (0)",
    )  # fmt: skip
    parser.add_argument(
        "--nnodes", type=_hosts, default=(1, 1), metavar="MIN:MAX",
        help="number of hosts, each with its own `shoal launch`; the run uses all that join, at least MIN (1)",
    )  # fmt: skip
    parser.add_argument(
        "--rdzv-endpoint", default="", metavar="HOST:PORT", help="the rendezvous address; HOST is one of the hosts"
    )
    parser.add_argument("--rdzv-id", default="", metavar="NAME", help="name of the run, the same on all hosts")
    parser.add_argument(
        "--local-addr",
        metavar="ADDRESS",
        help="address at which the other hosts reach this one (default: from its host name)",
    )
    parser.add_argument(
        "--allow-insecure", action="store_true",
        help="rendezvous over a network; torch's ports are not authenticated, so the network must be private",
    )  # fmt: skip
    parser.add_argument("--log-dir", type=Path, help="folder for each rank's stdout and stderr")
    parser.add_argument("--json", action="store_true", help="print the outcome as one line of JSON at the end")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    options = parser.parse_args(argv)
    if options.nproc < 1:
        parser.error(f"-n must be at least 1, got {options.nproc}")
    if not options.module and not Path(options.script).exists():
        parser.error(f"there is no file {options.script}")
    return options


def _hosts(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        return int(least), int(most or least)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be N or MIN:MAX, got {text!r}") from None


def main(argv: list[str]) -> int:
    options = parse(argv)
    from shoal.comm.launch.elastic import Restarts
    from shoal.errors import ConfigError
    from shoal.observe.security import is_loopback

    if options.rdzv_endpoint and not options.allow_insecure and not is_loopback(options.rdzv_endpoint):
        raise ConfigError(
            f"--rdzv-endpoint {options.rdzv_endpoint}: torch's ports have neither keys nor TLS, so anyone on that "
            "network could join the run; pass --allow-insecure if the network is private"
        )
    restarts = Restarts()
    with _log_folder(options.log_dir) as folder:
        code, failure = _run(options, folder, restarts)
        if failure is not None:
            _show(failure)
    if options.json:
        ended = {"exit_code": code, "ranks": options.nproc, "first_failure": failure, "restarts": restarts.reasons}
        print(json.dumps(ended))
    return code


@contextlib.contextmanager
def _log_folder(wanted: Path | None) -> Iterator[str]:
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        yield str(wanted)
        return
    folder = tempfile.mkdtemp(prefix="shoal-launch-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(options: argparse.Namespace, folder: str, restarts: Any) -> tuple[int, dict[str, Any] | None]:
    from shoal.comm.launch.elastic import Launch, run_elastic

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we report failures ourselves
    launch = Launch(
        nproc=options.nproc, hosts=options.nnodes, meet=options.rdzv_endpoint, run_id=options.rdzv_id,
        max_restarts=options.max_restarts, address=options.local_addr, log_dir=folder,
    )  # fmt: skip
    command = [sys.executable, "-u", *(["-m"] if options.module else []), options.script, *options.args]
    ended = run_elastic(launch, command, _tell, restarts)
    if ended.signal is not None:
        _tell(f"{ended.signal.name}, all ranks stopped")
        return 128 + ended.signal, None
    if ended.failure is None:
        return 0, None
    failure = asdict(ended.failure)
    return max(failure["exit_code"], 1), failure | {"tail": _tail(folder, ended.failure.rank)}


def _tell(text: str) -> None:
    print(f"shoal launch: {text}", file=sys.stderr, flush=True)


def _tail(folder: str, rank: int) -> list[str]:
    """Return the last lines of the rank's stderr in its last attempt, or of stdout if stderr is empty."""
    for stream in ("stderr.log", "stdout.log"):
        files = sorted(Path(folder).glob(f"**/{rank}/{stream}"))
        lines = files[-1].read_text(errors="replace").splitlines() if files else []
        if lines:
            return lines[-TAIL_LINES:]
    return []


def _show(failure: dict[str, Any]) -> None:
    how = failure["signal"] or f"exit code {failure['exit_code']}"
    print(
        f"\nshoal launch: rank {failure['rank']} failed first, with {how}; the other ranks were stopped",
        file=sys.stderr,
    )
    for line in failure["tail"]:
        print(f"  {line}", file=sys.stderr)
