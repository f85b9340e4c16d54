"""Creates tables on servers from the arguments of `shoal.HashTable`, and reads ``tables.toml``."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from typing import Any

from shoal.errors import ConfigError, ShoalError
from shoal.sharded.distributed_table import DistributedHashTable
from shoal.sharded.ps.client.client import PsClient
from shoal.sharded.ps.client.remote import RemoteHashTable
from shoal.table.budget.calls import own_policy
from shoal.table.budget.limits import MemoryBudget
from shoal.table.config.entry import HashTableConfigInstance
from shoal.table.config.optim import as_row_optimizer
from shoal.table.table import HashTable


def ps_table(
    client: PsClient,
    dim: int,
    *,
    name: str,
    seed: int = 0,
    on_bad_gradient: str = "raise",
    filter: Mapping[str, Any] | None = None,
    **table: Any,
) -> DistributedHashTable:
    """A table over all servers of a client, created there if it does not exist yet.

    ``dim`` and the keywords (``optimizer``, ``initializer``, ``expire_after``, ``lr``, ``max_rows``, ``max_bytes``,
    ``evict``) are those of `shoal.HashTable`; every worker must pass the same. Limits apply to each server's part.
    A write without ``req_time`` is stamped with the server's time. The rows of new ids depend only on ``seed`` and the
    id, not on the number of servers. ``filter`` describes an admission filter that every server creates: ``type``
    (sliding_hash_filter or probabilistic_filter), ``capacity``, ``split_num``, and ``config`` (a serialized threshold
    message in hex).
    """
    if not isinstance(client, PsClient):
        raise ConfigError(f"ps_table {name!r}: the first argument must be a PsClient(addresses), got {client!r}")
    if isinstance(table.get("max_bytes"), MemoryBudget) or own_policy(table.get("evict")) is not None:
        raise ConfigError(
            f"ps_table {name!r}: max_bytes must be a size and evict one of shoal's own policies for tables on servers"
        )
    config = HashTable(dim, name=name, **table).config
    return DistributedHashTable(
        client.num_ps,
        config,
        lambda i, c: RemoteHashTable(
            client, i, name, c, seed=seed, on_bad_gradient=on_bad_gradient, filters=filter, clocked=True
        ),
    )


def load_tables(path: str | os.PathLike[str]) -> dict[str, tuple[HashTableConfigInstance, dict[str, Any]]]:
    """Read the tables of a TOML file: name -> (configuration, options).

    The file::

        [tables.item]
        dim = 16
        optimizer = { kind = "adagrad", lr = 0.05 }   # or just "adagrad"
        initializer = "uniform"
        expire_after = "30d"
        max_bytes = "8GiB"                            # per server
        evict = "lru"
    """
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the tables of {os.fspath(path)!r} ({error.strerror or error})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from error
    tables = content.get("tables", {})
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f"{os.fspath(path)}: has no [tables.NAME] section")
    result = {}
    for name, given in tables.items():
        try:
            if not isinstance(given, dict):
                raise ConfigError(f"table {name!r} must be a section, got {given!r:.80}")
            result[name] = _table(name, dict(given), content.get("seed", 0))
        except (ShoalError, TypeError, ValueError, OverflowError, AttributeError) as error:
            named = str(error).startswith(f"table {name!r}")
            raise ConfigError(f"{os.fspath(path)}: {error if named else f'table {name!r}: {error}'}") from None
    return result


def _table(name: str, given: dict[str, Any], seed: int) -> tuple[HashTableConfigInstance, dict[str, Any]]:
    from shoal.table.config import optim

    options: dict[str, Any] = {"name": name, "seed": given.pop("seed", seed), "clocked": True}
    if type(options["seed"]) is not int:
        raise ConfigError(f"seed must be an integer, got {options['seed']!r}")
    options["on_bad_gradient"] = given.pop("on_bad_gradient", "raise")
    optimizer = given.pop("optimizer", "adagrad")
    if isinstance(optimizer, dict):
        kind = optimizer.pop("kind", None)
        if kind not in optim.ROW_OPTIMIZERS:
            raise ConfigError(f"optimizer.kind must be one of {', '.join(sorted(optim.ROW_OPTIMIZERS))}, got {kind!r}")
        optimizer = optim.ROW_OPTIMIZERS[kind](**optimizer)
    as_row_optimizer(optimizer)
    known = {"dim", "initializer", "expire_after", "lr", "max_rows", "max_bytes", "evict"}
    if unknown := set(given) - known:
        known |= {"optimizer", "on_bad_gradient", "seed"}
        raise ConfigError(
            f"table {name!r} has no option {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}"
        )
    if "dim" not in given:
        raise ConfigError("dim must be given")
    return HashTable(given.pop("dim"), optimizer=optimizer, name=name, **given).config, options
