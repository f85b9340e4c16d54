"""A small model, its plan and store, and payloads made to order."""

import torch

from shoal.gather import (
    GatherConfig,
    GatherPlan,
    GradientSpec,
    MemoryObject,
    MemoryStore,
    QuantSpec,
    compress,
    dump_payload,
)

WINDOW = 7
PRIMARIES = [2, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41]
RESERVES = [43, 5, 47, 2, 53, 59]  # contains some primaries again, good and bad ones
ABSENT, LATE, OUT_OF_RANGE, BAD_SHIFT, TRUNCATED = 5, 11, 17, 23, 31
BAD_RESERVE = 47
REASONS = {
    ABSENT: "not_found",
    LATE: "too_late",
    OUT_OF_RANGE: "index_out_of_range",
    BAD_SHIFT: "bad_quant_params",
    TRUNCATED: "corrupt_container",
    BAD_RESERVE: "missing_param",
}
TIME_MAX = 1_000_000
QUICK = GatherConfig(retry_interval_s=0.02)


def model_of(shapes=((64, 48), (48,), (10,)), dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return torch.nn.ParameterDict(
        {f"p{i}": torch.nn.Parameter(torch.randn(shape).to(dtype)) for i, shape in enumerate(shapes)}
    )


def small_spec(**kwargs):
    return GradientSpec.from_model(model_of(), **({"target_chunk": 16, "topk": 8, "quant": QuantSpec(4, 6)} | kwargs))


def gradients(spec, uid):
    generator = torch.Generator().manual_seed(uid)
    return {p.name: torch.randn(p.shape, generator=generator) for p in spec.params}


def payload(spec, uid, window=WINDOW):
    return compress(gradients(spec, uid), spec, global_step=100 + uid, window=window)


def small_objects(spec=None):
    """``{(window, uid): MemoryObject}``; every third container is a ``.pt``."""
    spec = spec or small_spec()
    objects = {}
    for uid in [*PRIMARIES, 43, 47, 53, 59]:
        made = payload(spec, uid)
        state = made["state_dict"]
        if uid == OUT_OF_RANGE:
            state["p2idxs"][:] = 255
        if uid == BAD_SHIFT:
            state["p1quant_params"] = (float("nan"), *state["p1quant_params"][1:])
        if uid == BAD_RESERVE:
            for key in [k for k in state if k.startswith("p1")]:
                del state[key]
        data = dump_payload(made, format="pt" if uid % 3 == 1 else "safetensors")
        if uid == TRUNCATED:
            data = data[: len(data) // 2]
        objects[WINDOW, uid] = MemoryObject(data, mtime_us=TIME_MAX + 1 if uid == LATE else 1000 + uid)
    del objects[WINDOW, ABSENT]
    return objects


def small_store(**kwargs):
    return MemoryStore(small_objects(), **kwargs)


def small_plan(**kwargs):
    return GatherPlan(WINDOW, PRIMARIES, RESERVES, **({"time_max": TIME_MAX, "timeout_s": 20.0} | kwargs))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def group_of(world):
    return torch.distributed.group.WORLD if world > 1 else None


RESULT_FIELDS = [
    "uids",
    "global_steps",
    "skipped_uids",
    "skip_reasons",
    "intended_uids",
    "missing_uids",
    "reserve_used_uids",
    "success_rate",
    "timestamps",
    "digests",
    "download_bytes",
    "upload_bytes",
    "window",
    "version",
    "spec_hash",
    "decision",
]


def result_fields(result):
    return {name: getattr(result, name) for name in RESULT_FIELDS}
