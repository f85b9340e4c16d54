"""The format of valid payloads for one model: chunk geometry, top-k, codec and quantization."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch

from shoal.errors import ConfigError

FORMAT_VERSION = 1
CODECS = ("packed12", "i32")


def canonical_json(value: Any) -> str:
    """Encode as JSON with sorted keys and no spaces: equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of ``n`` that is at most ``limit``."""
    best = 1
    for d in range(1, math.isqrt(n) + 1):
        if n % d == 0:
            for divisor in (d, n // d):
                if best < divisor <= limit:
                    best = divisor
    return best


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Values are sent as uint8 bin numbers: ``bins`` bins over ``range_sigmas`` standard deviations."""

    bins: int = 4
    range_sigmas: float = 6

    def __post_init__(self) -> None:
        if not (isinstance(self.bins, int) and 1 <= self.bins <= 256):
            raise ConfigError(f"QuantSpec: bins must be an int in 1..256 (values are uint8), got {self.bins!r}")
        if not (isinstance(self.range_sigmas, int | float) and 0 < self.range_sigmas < math.inf):
            raise ConfigError(f"QuantSpec: range_sigmas must be positive and finite, got {self.range_sigmas!r}")


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter's chunks: ``xshape`` is (grid, chunk) with one or two dimensions each."""

    name: str
    shape: tuple[int, ...]
    xshape: tuple[int, ...]
    k: int
    codec: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "xshape", tuple(int(n) for n in self.xshape))
        where = f"ParamSpec {self.name!r}"
        if len(self.xshape) not in (2, 4) or min(self.xshape) < 1:
            raise ConfigError(f"{where}: xshape must have 2 or 4 positive numbers, got {self.xshape}")
        if math.prod(self.xshape) != math.prod(self.shape):
            raise ConfigError(f"{where}: xshape must hold the elements of shape {self.shape}, got {self.xshape}")
        if self.codec not in CODECS:
            raise ConfigError(f"{where}: codec must be one of {CODECS}, got {self.codec!r}")
        if not 1 <= self.k <= self.totalk:
            raise ConfigError(f"{where}: k must be in 1..{self.totalk} (positions in a chunk), got {self.k}")
        if self.codec == "packed12" and (self.k % 2 or self.totalk > 4096):
            raise ConfigError(
                f"{where}: for packed12 k must be even and totalk at most 4096, got {self.k} and {self.totalk}"
            )

    @property
    def grid(self) -> tuple[int, ...]:
        return self.xshape[: len(self.xshape) // 2]

    @property
    def chunks(self) -> int:
        return math.prod(self.grid)

    @property
    def totalk(self) -> int:
        """Number of positions in one chunk."""
        return math.prod(self.xshape[len(self.xshape) // 2 :])

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """(grid rows, grid columns, chunk height, chunk width); a 1-d parameter is one row."""
        if len(self.xshape) == 4:
            y, x, h, w = self.xshape
            return y, x, h, w
        return 1, self.xshape[0], 1, self.xshape[1]

    @property
    def index_bytes(self) -> int:
        """Bytes of one chunk's indices."""
        return self.k // 2 * 3 if self.codec == "packed12" else 4 * self.k

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "shape": list(self.shape),
            "xshape": list(self.xshape),
            "k": self.k,
            "codec": self.codec,
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ParamSpec":
        return cls(fields["name"], tuple(fields["shape"]), tuple(fields["xshape"]), fields["k"], fields["codec"])

    @classmethod
    def of(cls, name: str, shape: Iterable[int], *, target_chunk: int = 64, topk: int = 64) -> "ParamSpec":
        """Choose the chunk sizes, ``k`` and the codec of a parameter, by the rule of producers and validators."""
        shape = tuple(shape)
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in (target_chunk, topk)):
            raise ConfigError(f"target_chunk and topk must be ints, at least 1, got {target_chunk!r} and {topk!r}")
        if math.prod(shape) == 0:
            raise ConfigError(f"parameter {name!r} must have elements, got shape {shape}; exclude it with params=[...]")
        if len(shape) <= 1:
            n = shape[0] if shape else 1
            g = largest_divisor(n, target_chunk)
            xshape: tuple[int, ...] = (n // g, g)
            totalk = g
        else:
            r, c = shape[0], math.prod(shape[1:])
            gr, gc = largest_divisor(r, target_chunk), largest_divisor(c, target_chunk)
            xshape = (r // gr, c // gc, gr, gc)
            totalk = gr * gc
        k = min(topk, totalk)
        if k >= 2 and totalk <= 4096:
            return cls(name, shape, xshape, k - k % 2, "packed12")
        return cls(name, shape, xshape, k, "i32")


@dataclass(frozen=True)
class GradientSpec:
    """All parameters of a model, in registration order. Producers and all ranks must have the same ``hash``."""

    params: tuple[ParamSpec, ...]
    quant: QuantSpec | None = None
    index: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", tuple(self.params))
        object.__setattr__(self, "index", {p.name: i for i, p in enumerate(self.params)})
        if len(self.index) != len(self.params):
            names = [p.name for p in self.params]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"GradientSpec: names of parameters must be unique, got {twice!r} twice")

    @classmethod
    def from_model(
        cls,
        model: torch.nn.Module,
        *,
        target_chunk: int = 64,
        topk: int = 64,
        quant: QuantSpec | None = QuantSpec(bins=4, range_sigmas=6),
        params: Iterable[str] | None = None,
    ) -> "GradientSpec":
        """Build one ParamSpec per trainable parameter (meta tensors are fine); with ``params``, only these names.

        Example:
            >>> spec = GradientSpec.from_model(torch.nn.Linear(4, 6), target_chunk=4, topk=4)
            >>> [(p.name, p.xshape, p.k) for p in spec.params]
            [('weight', (2, 1, 3, 4), 4), ('bias', (2, 3), 2)]
        """
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        wanted = set(trainable if params is None else params)
        if unknown := sorted(wanted - trainable.keys()):
            raise ConfigError(f"GradientSpec.from_model: the model has no trainable parameter named {unknown}")
        return cls(
            tuple(
                ParamSpec.of(name, p.shape, target_chunk=target_chunk, topk=topk)
                for name, p in trainable.items()
                if name in wanted
            ),
            quant,
        )

    @cached_property
    def hash(self) -> str:
        """Hex BLAKE2b-128 of the canonical JSON of everything that determines the format of a payload."""
        return blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    @cached_property
    def payload_bytes(self) -> int:
        """Raw bytes of one honest payload's indices and values."""
        item = 4 if self.quant is None else 1
        return sum(p.chunks * (p.index_bytes + item * p.k) for p in self.params)

    def to_json(self) -> str:
        quant = (
            None if self.quant is None else {"bins": self.quant.bins, "range_sigmas": float(self.quant.range_sigmas)}
        )
        return canonical_json({"format": FORMAT_VERSION, "params": [p.to_dict() for p in self.params], "quant": quant})

    @classmethod
    def from_json(cls, text: str) -> "GradientSpec":
        try:
            fields = json.loads(text)
            quant = fields["quant"]
            if fields["format"] != FORMAT_VERSION:
                raise ConfigError(f"gradient spec: format must be {FORMAT_VERSION}, got {fields['format']!r}")
            return cls(
                tuple(ParamSpec.from_dict(p) for p in fields["params"]),
                None if quant is None else QuantSpec(quant["bins"], quant["range_sigmas"]),
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ConfigError(f"the text is not the JSON of a gradient spec: {error!r}") from error
