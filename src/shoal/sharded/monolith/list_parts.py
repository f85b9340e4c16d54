"""The lists of ids that a sharded batch has for each part, read and updated: in this process or on servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.ragged import Ragged
from shoal.sharded.devices import home
from shoal.sharded.export import predict_raw, predict_slots


def local_lookup(
    fan: Any, lists: Sequence[dict[str, Any]], native: bool, features: Sequence[str], float16: bool
) -> list[dict[str, Tensor]]:
    """Per part ``{table: flat rows}``; with native tables the one list is over all features."""
    result = []
    for part, wanted in zip(fan.parts, lists, strict=True):
        if native:
            [(table, ids)] = wanted["ids"].items()
            result.append({table: part.raw_lookup(Ragged(ids.to(home(part)), wanted["splits"][table]))})
            continue
        found = part.lookup({table: ids.to(home(part)) for table, ids in wanted["ids"].items()})
        flat = {table: rows.reshape(-1) for table, rows in found.items()}
        result.append({table: rows.half().float() for table, rows in flat.items()} if float16 else flat)
    return result


def exported_lookup(
    lists: Sequence[dict[str, Any]], native: bool, features: Sequence[str], dims: Mapping[str, int], deadline: int
) -> list[dict[str, Tensor]]:
    """The same from the serving processes of the parts, in an exported model."""
    result = []
    for ps, wanted in enumerate(lists):
        if native:
            [(table, ids)] = wanted["ids"].items()
            splits = wanted["splits"][table]
            floats = sum(n * dims[f] for n, f in zip(splits.diff().tolist(), features, strict=True))
            result.append({table: predict_raw(ps, ids, splits, floats, deadline)})
        else:
            result.append(predict_slots(ps, wanted["ids"], dims, deadline))
    return result


def local_apply(
    fan: Any, lists: Sequence[dict[str, Any]], native: bool, features: Sequence[str], dims: Mapping[str, int],
    step: int, seconds: int, float16: bool,
) -> None:  # fmt: skip
    for part, work in zip(fan.parts, lists, strict=True):
        grads = {t: g.half().float() if float16 else g for t, g in work["grads"].items()}
        if native:
            [(table, ids)] = work["ids"].items()
            ragged = Ragged(ids.to(home(part)), work["splits"][table])
            part.raw_apply_gradients(ragged, grads[table], step, seconds)
            continue
        pairs = {t: (ids.to(home(part)), grads[t].view(-1, dims[t])) for t, ids in work["ids"].items()}
        part.apply_gradients(pairs, step, req_time=seconds)


def _flat(work: dict[str, Any], native: bool, features: Sequence[str]) -> tuple[list[str], list[int], Tensor]:
    """Table names, ids of each, and all ids as one list."""
    if native:
        [(table, ids)] = work["ids"].items()
        return list(features), work["splits"][table].diff().tolist(), ids
    names = sorted(work["ids"])
    return names, [work["ids"][name].numel() for name in names], torch.cat([work["ids"][name] for name in names])


def remote_lookup(
    fan: Any, lists: Sequence[dict[str, Any]], native: bool, features: Sequence[str], float16: bool
) -> list[dict[str, Tensor]]:
    from shoal.sharded.ps.protocol import as_tensor

    flat = [_flat(work, native, features) for work in lists]
    requests = {
        i: part.lookup_request(*flat[i], float16=float16) for i, part in enumerate(fan.parts) if flat[i][2].numel()
    }
    replies = fan.client.read(requests)
    result = []
    for i, (part, work) in enumerate(zip(fan.parts, lists, strict=True)):
        rows = torch.empty(0, device="cpu")
        if i in replies:
            rows = as_tensor(replies[i].payload[0], torch.float16 if float16 else torch.float32).float()
        if native:
            result.append(dict.fromkeys(work["ids"], rows))
        else:
            names, counts, _ = flat[i]
            sizes = [n * part.dims[name] for n, name in zip(counts, names, strict=True)]
            result.append(dict(zip(names, torch.split(rows, sizes), strict=True)))
    return result


def remote_apply(
    fan: Any, lists: Sequence[dict[str, Any]], native: bool, features: Sequence[str], dims: Mapping[str, int],
    step: int, seconds: int, float16: bool,
) -> None:  # fmt: skip
    from shoal.sharded.ps.protocol import Op

    requests = {}
    for i, (part, work) in enumerate(zip(fan.parts, lists, strict=True)):
        names, counts, ids = _flat(work, native, features)
        grads = work["grads"]
        flat = next(iter(grads.values())) if native else torch.cat([grads[name] for name in names])
        requests[i] = part.write_request(
            Op.APPLY, names, counts, ids, flat, step=step, seconds=seconds, float16=float16
        )
        requests[i].read_version = fan.client.versions[i]
    fan.client.write(requests, wait=False)
