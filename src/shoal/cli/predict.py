"""`shoal predict`: query a served model from the command line."""

import asyncio
import base64
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
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
    """Outputs to print; by default all."""
    deadline: float = 10.0
    """Seconds allowed per row, including retries."""
    bzid: str = "shoal"
    """Business id in the registry."""
    json: bool = False
    """Also print a line for each refused row on stdout: {"error": "...", "code": 3}."""
    security: CallSecurity = field(default_factory=CallSecurity)


def main(argv: list[str]) -> int:
    options = parse(Options, argv, "predict", DESCRIPTION, positional=("servers", "rows"))
    if options.servers is None:
        raise UsageError("SERVERS must be given: host:port of a server, or a registry")
    if not options.model:
        raise UsageError("--model NAME must be given: the name under which the model is served")
    if not options.rows and sys.stdin.isatty():
        raise UsageError("""rows must be given: JSON objects such as '{"user": "u17"}', or one per line on stdin""")
    return asyncio.run(predict(options))


async def predict(options: Options) -> int:
    """Query all rows; return 1 if some were not answered."""
    from shoal.serving.client.client import Client

    client = Client(
        options.servers, model=options.model, signature=options.signature, version=options.version,
        deadline=timedelta(seconds=options.deadline), security=options.security.build(), bzid=options.bzid,
    )  # fmt: skip
    waiting: asyncio.Queue[tuple[str, asyncio.Task] | None] = asyncio.Queue(AT_ONCE)
    rows = _rows(options)
    async with client:
        printing = asyncio.create_task(_print_all(waiting, options.json))
        while (row := await asyncio.to_thread(next, rows, None)) is not None:
            where, text = row
            await waiting.put((where, asyncio.create_task(_ask(client, text, options.output))))
        await waiting.put(None)
        return 1 if await printing else 0


async def _print_all(waiting: asyncio.Queue, as_json: bool) -> int:
    """Print answers in order; return the number of failures."""
    failed = 0
    while (one := await waiting.get()) is not None:
        where, task = one
        try:
            print(json.dumps(await task), flush=True)
        except ShoalError as error:
            failed += 1
            if as_json:
                print(json.dumps({"error": str(error), "code": getattr(error, "code", None)}), flush=True)
            print(f"shoal predict: {where}: {error}", file=sys.stderr)
    return failed


def _rows(options: Options) -> Iterator[tuple[str, str]]:
    """Yield (position, JSON) of each row."""
    if options.rows:
        yield from ((f"row {number}", text) for number, text in enumerate(options.rows, 1))
        return
    yield from ((f"line {number}", line) for number, line in enumerate(sys.stdin, 1) if line.strip())


async def _ask(client: Any, text: str, outputs: tuple[str, ...]) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"a row must be a JSON object: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"a row must be a JSON object, got {text.strip()[:40]!r}")
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
