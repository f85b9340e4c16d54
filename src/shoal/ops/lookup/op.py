"""`map_id_to_embedding`, `gather_embeddings_by_input` and their gradients."""

from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.ops import checks
from shoal.ops._op import Op
from shoal.ops.lookup import reference
from shoal.ops.reduce.by_index import sum_by_index


def map_id_to_embedding(ids: Any, embeddings: Any, input: Any, use_multi_threads: bool = True) -> Tensor:
    """Look up each id of ``input`` in several lists of ids, and return its embedding.

    Args:
        ids: K int64 vectors. If an id occurs more than once, the first occurrence is used.
        embeddings: K tensors ``[len(ids[k]), d]``; gradients flow to them.
        input: int64 of any shape; an id that is in no list raises.
        use_multi_threads: the result is the same either way.

    Returns:
        ``input.shape + [d]``.

    >>> map_id_to_embedding([[5, 9], [4]], [[[1, 2], [3, 4]], [[5, 6]]], [9, 4]).tolist()
    [[3.0, 4.0], [5.0, 6.0]]
    """
    op = "map_id_to_embedding"
    ids = checks.vector_list(ids, op, "ids")
    rows = checks.float_list(embeddings, op, "embeddings")
    width = next((r.shape[1] for r in rows if r.dim() == 2), 0)
    rows = [checks.fit_empty(r, width) for r in rows]
    return _map(ids, rows, checks.int64(input, op, "input"), bool(use_multi_threads))[0]


def map_id_to_embedding_gradient_back_prop(ids: Any, input: Any, grads: Any) -> list[Tensor]:
    """The gradient of `map_id_to_embedding` for each of its embeddings; ``grads`` is ``input.shape + [d]``."""
    op = "map_id_to_embedding_gradient_back_prop"
    ids = checks.vector_list(ids, op, "ids")
    input = checks.int64(input, op, "input")
    grads = checks.constant(checks.floats(grads, op, "grads"))
    if grads.shape[:-1] != input.shape or grads.dim() != input.dim() + 1:
        raise ConfigError(
            f"{op}: grads must have shape input.shape + [d], got {list(grads.shape)} for {list(input.shape)}"
        )
    return _sum_into(_places(ids, input), grads, [i.shape[0] for i in ids])


def gather_embeddings_by_input(
    ids: Any, embeddings: Any, input: Any, use_multi_threads: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the embedding of each id of ``input`` from one table, and its position there.

    Args:
        ids: int64 ``[m]``. embeddings: ``[m, d]``; a gradient flows to it.
        input: int64 of any shape; an id that is not in ``ids`` raises.
        use_multi_threads: the result is the same either way.

    Returns:
        ``output`` of shape ``input.shape + [d]`` and ``index_mapping``, int64 ``input.shape``: positions in ``ids``.
    """
    op = "gather_embeddings_by_input"
    ids, rows = checks.vector(ids, op, "ids"), checks.floats(embeddings, op, "embeddings")
    if rows.dim() != 2 or rows.shape[0] != ids.shape[0]:
        raise ConfigError(f"{op}: embeddings must be [{ids.shape[0]}, d], one row per id, got shape {list(rows.shape)}")
    return tuple(_map([ids], [rows], checks.int64(input, op, "input"), bool(use_multi_threads)))


def gather_embeddings_by_ids_gradient_back_prop(ids: Any, grads: Any, index_mapping: Any) -> Tensor:
    """The gradient of `gather_embeddings_by_input`: ``out[index_mapping[k]] += grads[k]``, ``[len(ids), d]``."""
    op = "gather_embeddings_by_ids_gradient_back_prop"
    ids = checks.vector(ids, op, "ids")
    grads = checks.constant(checks.floats(grads, op, "grads"))
    index = checks.int64(index_mapping, op, "index_mapping").reshape(-1)
    if grads.dim() < 1 or grads.numel() != index.numel() * grads.shape[-1]:
        raise ConfigError(
            f"{op}: grads must hold one row per entry of index_mapping, got shape {list(grads.shape)} for "
            f"{index.numel()}"
        )
    return sum_by_index(index, grads.reshape(index.numel(), grads.shape[-1]), ids.shape[0])


def _sum_into(place: Tensor, grads: Tensor, lengths: list[int]) -> list[Tensor]:
    total = sum_by_index(place.reshape(-1), grads.reshape(place.numel(), grads.shape[-1]), sum(lengths))
    return list(total.split(lengths))


def _check_map(ids: list[Tensor], embeddings: list[Tensor], input: Tensor, multi_threads: bool) -> None:
    op = "map_id_to_embedding"
    checks.check_same(op, "the number of embeddings", len(embeddings), "the number of id lists", len(ids))
    if not ids:
        raise ConfigError(f"{op}: ids must hold at least one list, got none")
    for k, (i, rows) in enumerate(zip(ids, embeddings, strict=True)):
        if rows.dim() != 2 or rows.shape[0] != i.shape[0]:
            raise ConfigError(
                f"{op}: embeddings[{k}] must be [{i.shape[0]}, d], one row per id, got shape {list(rows.shape)}"
            )
        if rows.shape[1] != embeddings[0].shape[1] or rows.dtype != embeddings[0].dtype:
            raise ConfigError(
                f"{op}: all embeddings must have one width and dtype, but embeddings[{k}] is {rows.dtype}"
                f" {list(rows.shape)} and embeddings[0] is {embeddings[0].dtype} {list(embeddings[0].shape)}"
            )


def _map_cpu(ids: list[Tensor], embeddings: list[Tensor], input: Tensor, multi_threads: bool) -> tuple[Tensor, Tensor]:
    ids = [i.contiguous() for i in ids]
    embeddings = [e.detach().contiguous() for e in embeddings]
    input = input.contiguous()
    d = embeddings[0].shape[1]
    out = embeddings[0].new_empty((*input.shape, d))
    place = torch.empty_like(input)
    _core.map_id_to_embedding(
        [i.data_ptr() for i in ids], [i.numel() for i in ids], [e.data_ptr() for e in embeddings],
        d * out.element_size(), input.data_ptr(), input.numel(), out.data_ptr(), place.data_ptr(), multi_threads,
    )  # fmt: skip
    return out, place


_map = Op(
    "map_id_to_embedding(Tensor[] ids, Tensor[] embeddings, Tensor input, bool multi_threads) -> (Tensor, Tensor)",
    check=_check_map,
    cpu=_map_cpu,
    reference=reference.map_id_to_embedding,
    cuda="lookup:map_id_to_embedding",
    fake=lambda ids, embeddings, input, multi_threads: (
        embeddings[0].new_empty((*input.shape, embeddings[0].shape[1])),
        input.new_empty(input.shape),
    ),
)


def _setup_map(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])
    ctx.lengths = [i.shape[0] for i in inputs[0]]
    ctx.mark_non_differentiable(output[1])


def _backward_map(ctx: Any, grad: Tensor, _: Any) -> Any:
    return [None] * len(ctx.lengths), _sum_into(ctx.saved_tensors[0], grad, ctx.lengths), None, None


_map.register_gradient(_backward_map, _setup_map)


def _check_places(ids: list[Tensor], input: Tensor) -> None:
    if not ids:
        raise ConfigError("map_id_to_embedding: ids must hold at least one list, got none")


def _places_cpu(ids: list[Tensor], input: Tensor) -> Tensor:
    ids, input = [i.contiguous() for i in ids], input.contiguous()
    place = torch.empty_like(input)
    _core.map_id_to_embedding(
        [i.data_ptr() for i in ids], [i.numel() for i in ids], [0] * len(ids), 0,
        input.data_ptr(), input.numel(), 0, place.data_ptr(), True,
    )  # fmt: skip
    return place


_places = Op(
    "id_places(Tensor[] ids, Tensor input) -> Tensor",
    check=_check_places,
    cpu=_places_cpu,
    reference=reference.id_places,
    cuda="lookup:id_places",
    fake=lambda ids, input: input.new_empty(input.shape),
)
