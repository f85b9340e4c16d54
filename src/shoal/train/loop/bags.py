"""Batches by feature, as modules over several tables take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.data.samples import Samples
from shoal.nn import FirstN
from shoal.train.loop.table_config import TableConfig


@dataclass(frozen=True, slots=True)
class Keyed:
    """Ids by feature, as a KeyedJaggedTensor has them: the bags of the first feature, then those of the second, …"""

    keys: tuple[str, ...]
    values: Tensor
    offsets: Tensor

    @staticmethod
    def of(samples: Samples, features: tuple[str, ...]) -> Keyed:
        """The ids of samples, which have them sample by sample."""
        n, count = len(samples), len(features)
        if samples.offsets is None:
            ids = samples.ids.t().reshape(-1)
            return Keyed(features, ids, torch.arange(ids.numel() + 1, device="cpu"))
        lengths = samples.offsets.diff().view(n, count).t().reshape(-1)
        starts = samples.offsets[:-1].view(n, count).t().reshape(-1)
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(lengths, 0, out=offsets[1:])
        places = torch.repeat_interleave(starts - offsets[:-1], lengths)
        places += torch.arange(places.numel(), device="cpu")
        return Keyed(features, samples.ids[places], offsets)


def combiner_of(config: TableConfig) -> Any:
    """The combiner of a feature, as modules take it."""
    return FirstN(config.length) if config.combiner == "firstn" else config.combiner
