"""A generated stream of clicks with a growing vocabulary, drifting tastes and known true probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.fid import make_v2

FIELDS = ("user", "item", "author", "tags", "hour", "category")
_SLOT = {name: number for number, name in enumerate(FIELDS, start=1)}

_FACTORS = 4
_HOURS, _CATEGORIES = 24, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """A stream of ``days * batches_per_day`` batches.

    New users and items appear at a steady rate and are seen mostly while they are new; ``users`` and ``items`` are
    their numbers at the end of the stream.
    """

    days: int = 30
    batches_per_day: int = 60
    batch_size: int = 2048
    users: int = 60_000
    items: int = 60_000
    seed: int = 0

    @property
    def samples(self) -> int:
        return self.days * self.batches_per_day * self.batch_size


@dataclass(frozen=True, slots=True)
class Batch:
    """``ids`` by field, as ``(values, offsets)``, the labels, and the true click probabilities, which no model sees."""

    day: int
    time_s: int
    ids: dict[str, tuple[Tensor, Tensor]]
    clicks: Tensor
    probabilities: Tensor


def stream(config: StreamConfig) -> Iterator[Batch]:
    """Yield the batches in order; equal configurations give equal batches."""
    generator = torch.Generator().manual_seed(config.seed)
    world = _World(config, generator)
    batches = config.days * config.batches_per_day
    for number in range(batches):
        yield world.batch(number, number / batches, generator)


class _World:
    """The parameters that the true click probabilities depend on."""

    def __init__(self, config: StreamConfig, generator: torch.Generator) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cpu")

        self.config = config
        self.salt = int(torch.randint(1 << 40, (1,), generator=generator, device="cpu"))
        authors, tags = config.items // 12 + 1, config.items // 8 + 1
        self.user_bias, self.item_bias = normal(config.users), normal(config.items)
        # During the stream, a taste turns from its first direction to its second.
        self.taste = normal(config.users, 2, _FACTORS)
        self.item_taste = normal(config.items, _FACTORS)
        # An item's author and tags are about as new as the item.
        spread = torch.rand(config.items, 4, generator=generator, device="cpu")
        place = torch.arange(config.items, device="cpu").unsqueeze(1) / config.items
        near = (place - 0.03 * spread).clamp(0, 1)
        self.author = (near[:, 0] * (authors - 1)).long()
        self.tags = (near[:, 1:] * (tags - 1)).long()
        self.tag_count = torch.randint(0, 4, (config.items,), generator=generator, device="cpu")
        self.category = torch.randint(_CATEGORIES, (config.items,), generator=generator, device="cpu")
        self.author_bias, self.tag_bias = normal(authors), normal(tags)
        self.hour_category = normal(_HOURS, _CATEGORIES)

    def batch(self, number: int, progress: float, generator: torch.Generator) -> Batch:
        config = self.config
        size = config.batch_size
        user = _recent(progress, config.users, 0.10, size, generator)
        item = _recent(progress, config.items, 0.05, size, generator)
        now = number * _HOURS // config.batches_per_day
        hour = (now + torch.randint(2, (size,), generator=generator, device="cpu")) % _HOURS
        kept = torch.arange(3, device="cpu") < self.tag_count[item].unsqueeze(1)
        tags = self.tags[item]
        turn = progress * math.pi / 2
        taste = math.cos(turn) * self.taste[user, 0] + math.sin(turn) * self.taste[user, 1]
        logit = (
            -1.8
            + 1.0 * self.user_bias[user]
            + 1.1 * self.item_bias[item]
            + 0.5 * self.author_bias[self.author[item]]
            + 0.4 * (self.tag_bias[tags] * kept).sum(1)
            + 0.4 * self.hour_category[hour, self.category[item]]
            + 0.3 * (taste * self.item_taste[item]).sum(1)
        )
        probabilities = torch.sigmoid(logit)
        clicks = (torch.rand(size, generator=generator, device="cpu") < probabilities).float()
        single = torch.arange(size + 1, device="cpu")
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), self.tag_count[item].cumsum(0)])
        plain = {"user": user, "item": item, "author": self.author[item], "hour": hour, "category": self.category[item]}
        ids = {name: (self._fid(name, value), single) for name, value in plain.items()}
        ids["tags"] = (self._fid("tags", tags[kept]), offsets)
        return Batch(
            day=number // config.batches_per_day,
            time_s=int(86400 * (1 + number / config.batches_per_day)),
            ids={name: ids[name] for name in FIELDS},
            clicks=clicks,
            probabilities=probabilities,
        )

    def _fid(self, field: str, number: Tensor) -> Tensor:
        """Ids as in practice: 64 unordered bits, with the field in the upper ones."""
        mixed = (number + self.salt + 1) * -0x61C8864680B583EB
        mixed = (mixed ^ (mixed >> 29)) * -0x40A7B892E31B1A47
        return make_v2(_SLOT[field], mixed ^ (mixed >> 32))


def _recent(progress: float, total: int, window: float, size: int, generator: torch.Generator) -> Tensor:
    """Draw ``size`` numbers below ``total`` that exist at ``progress``; new numbers, and a few others, are frequent.

    A third of all numbers exist when the stream begins. The age of a drawn number is exponentially distributed, with
    ``window`` of the stream as its mean. Then half of the draws go to every 4th number, half of these to every 16th, ….
    """

    def chance() -> Tensor:
        return torch.rand(size, generator=generator, device="cpu").clamp_min(1e-9)

    existing = total * (1 / 3 + 2 / 3 * progress)
    age = -torch.log(chance()) * window * total * 2 / 3
    number = (existing - 1 - age % existing).long()
    step = 4 ** torch.floor(-torch.log2(chance())).clamp_max(5).long()
    return (number - number % step).clamp(0, total - 1)
