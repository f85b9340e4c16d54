"""`shoal predict`: query a served model from the command line."""

import asyncio
import base64
import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shoal.cli.shared.arguments import parse
from shoal.cli.shared.security_options import CallSecurity
from shoal.errors import ConfigError, ShoalError, UsageError

DESCRIPTION = """Query a served model: one JSON object per row in, one JSON object per row out.

Example: shoal predict 127.0.0.1:8500 --model ctr '{"user": "u17", "age": 33}'

Several replicas, or those in a registry (--registry of shoal serve):
  shoal predict a:8500,b:8500 --model ctr '{"user": "u17", "age": 33}'
  shoal predict dir:///shared/registry --model ctr '{"user": "u17", "age": 33}'

Rows from a file, one JSON object per line; a list is a feature with several values:
  shoal predict 127.0.0.1:8500 --model ctr < rows.jsonl > scores.jsonl

Predictions are in the order of the rows. A row that the model refuses is reported on stderr; the others continue.

Exit codes: 0 every row was answered, 1 some were not, 2 wrong usage."""

AT_ONCE = 512
"""Maximum number of rows in flight."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of `shoal predict`."""

    servers: str | None = None
    """host:port[,host:port...] of gRPC ports, or a registry: dir:///path, zk://host:port,..., or a folder."""
    rows: tuple[str, ...] = ()
    """JSON objects, one per row; without any they are read from stdin, one per line."""
    model: str = ""
    """The name under which the model is served."""
    signature: str = "serving_default"
    """The signature to call."""
    version: int | None = None
    """The version to query; by default the newest."""
    output: tuple[str, ...] = ()
    """An output to print; by default all."""
    deadline: float = 10.0
    """Seconds allowed per row, including retries."""
    bzid: str = "shoal"
    """Business id in the registry."""
    json: bool = False
    """Also print a line for each refused row on stdout: {"error": "...", "code": 3}."""
    security: CallSecurity = field(default_factory=CallSecurity)


def main(argv: list[str]) -> int:
    options = parse(Options, argv, "predict", DESCRIPTION, positional=("servers", "rows"), repeated=("output",))
    if options.servers is None:
        raise UsageError("SERVERS must be given: host:port of a server, or a registry")
    if not options.model:
        raise UsageError("--model NAME must be given: the name under which the model is served")
    if not options.rows and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("""rows must be given: JSON objects such as '{"user": "u17"}', or one per line on stdin""")
    return asyncio.run(predict(options))


async def predict(options: Options) -> int:
    """Query all rows; return 1 if some were not answered."""
    from shoal.serving.client.client import Client
    from shoal.serving.cluster.registry import check_directory

    check_directory(options.servers or "")
    client = Client(
        options.servers, model=options.model, signature=options.signature, version=options.version,
        deadline=options.deadline, security=options.security.build(), bzid=options.bzid,
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[tuple[str, asyncio.Task] | OSError | None] = asyncio.Queue()
    room = threading.Semaphore(AT_ONCE)

    def begin(where: str, text: str | bytes) -> None:
        waiting.put_nowait((where, loop.create_task(_ask(client, text, options.output))))

    def read() -> None:
        end: OSError | None = None
        with contextlib.suppress(RuntimeError):  # the loop is closed: printing has failed, or Ctrl-C
            try:
                for where, text in _rows(options):
                    room.acquire()
                    loop.call_soon_threadsafe(begin, where, text)
            except OSError as error:
                end = error
            loop.call_soon_threadsafe(waiting.put_nowait, end)

    async with client:
        # A daemon, so that the command can end while this thread waits for a line.
        threading.Thread(target=read, name="shoal-rows", daemon=True).start()
        failed = 0
        while (one := await waiting.get()) is not None:
            if isinstance(one, OSError):
                raise one
            failed += not await _print(*one, options.json)
            room.release()
        return 1 if failed else 0


async def _print(where: str, task: asyncio.Task, as_json: bool) -> bool:
    """Print the answer to a row; return whether there is one."""
    try:
        print(json.dumps(await task), flush=True)
        return True
    except ShoalError as error:
        if as_json:
            print(json.dumps({"error": str(error), "code": getattr(error, "code", None)}), flush=True)
        print(f"shoal predict: {where}: {error}", file=sys.stderr)
        return False


def _rows(options: Options) -> Iterator[tuple[str, str | bytes]]:
    """Yield (position, JSON) of each row."""
    if options.rows:
        yield from ((f"row {number}", text) for number, text in enumerate(options.rows, 1))
        return
    # Not sys.stdin: Python cannot exit while another thread waits in its buffer.
    with open(sys.stdin.fileno(), "rb", closefd=False) as lines:
        yield from ((f"line {number}", line) for number, line in enumerate(lines, 1) if line.strip())


async def _ask(client: Any, text: str | bytes, outputs: tuple[str, ...]) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"a row must be a JSON object: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"a row must be a JSON object, got {json.dumps(row)[:40]}")
    answer = await client.predict_async({name: [value] for name, value in row.items()}, outputs=outputs)
    return {name: _plain(value[0] if value.ndim else value) for name, value in answer.items()}


def _plain(value: Any) -> Any:
    """Convert to JSON's types: text as it is, other bytes as ``{"b64": …}``."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"b64": base64.b64encode(value).decode()}
    plain = value.tolist()
    return [_plain(each) if isinstance(each, bytes) else each for each in plain] if isinstance(plain, list) else plain
