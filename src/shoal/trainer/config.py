"""The configuration of a training run: frozen sections, read from TOML, each value checked when it is given."""

from __future__ import annotations

import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from shoal import _core
from shoal.data.schema import CRITEO, Schema
from shoal.errors import ConfigError

T = TypeVar("T")


def _at_least(section: object, **limits: float) -> None:
    for name, least in limits.items():
        value = getattr(section, name)
        if value is not None and not value >= least:
            raise ConfigError(f"[{_SECTION[type(section)]}] {name} is at least {least:g}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """``[data]``: the files, and what their columns are. With the format ``criteo`` the columns are known."""

    train: tuple[str, ...]
    """Paths, folders and glob patterns, relative to the configuration."""
    eval: tuple[str, ...] = ()
    """Files that are never learnt from, for evaluation and early stopping."""
    format: str = "criteo"
    """criteo, csv, tsv, parquet, tfrecord, example or example_batch."""
    label: str = ""
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    time: str | None = None
    slots: dict[str, int] = field(default_factory=dict)
    raw: bool = False
    positive_above: float | None = None
    log_dense: bool | None = None
    shuffle_rows: int = 65536
    """Rows in memory that are shuffled; 0 keeps the order. Raise it when neighbours in the files are alike."""
    prefetch: int | None = None
    """Batches that a thread reads ahead; 0 reads between steps, on all threads. By default 8, and 0 where there are no
    more than two CPUs: there a reading thread takes more from the step than it saves."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the format: columns, delimiter, quote, separator, max_line_bytes, part_bytes; lists."""

    def __post_init__(self) -> None:
        _at_least(self, shuffle_rows=0, prefetch=0)
        if not self.train:
            raise ConfigError("[data] train names the files to learn from, got none")
        self.make_format()

    def schema(self) -> Schema:
        criteo = self.format == "criteo"
        log_dense = criteo if self.log_dense is None else self.log_dense
        names: dict[str, Any] = {"label": self.label, "dense": self.dense, "sparse": self.sparse}
        if criteo:
            names = {name: given or getattr(CRITEO, name) for name, given in names.items()}
        return Schema(
            **names, time=self.time, slots=self.slots, raw=self.raw, positive_above=self.positive_above,
            log_dense=log_dense,
        )  # fmt: skip

    def make_format(self) -> Any:
        from shoal.data.formats import FORMATS, make_format

        options = dict(self.options)
        if self.format not in FORMATS:
            raise ConfigError(f"[data] format is one of {', '.join(FORMATS)}, got {self.format!r}")
        if "threads" in FORMATS[self.format][1]:
            options.setdefault("threads", not self.ahead())
        return make_format(self.format, self.schema(), **options)

    def ahead(self) -> int:
        """Batches to read ahead."""
        if self.prefetch is not None:
            return self.prefetch
        return 8 if _core.num_threads() > 2 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """``[table]``: one table holds the rows of all features."""

    name: str = "features"
    dim: int = 16
    optimizer: str = "adagrad"
    """adagrad, adam, sgd, ftrl, rowwise_adagrad, …: any of the row optimizers."""
    lr: float = 0.05
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    """Further settings of the optimizer, such as ``betas``. Adagrad's ``initial_accumulator`` is 0 unless given."""
    init_scale: float = 0.01
    """New rows are uniform in [-init_scale, init_scale)."""
    combiner: Literal["sum", "mean"] = "sum"
    """How the rows of a feature with many ids become one."""
    expire_after: str | None = None
    """Text such as 30d: rows that were not updated for so long are removed at checkpoints."""

    def __post_init__(self) -> None:
        _at_least(self, dim=1, lr=0, init_scale=0)
        self.row_optimizer()

    def row_optimizer(self) -> Any:
        from shoal.table import optim

        if self.optimizer not in optim._BY_NAME:
            known = ", ".join(sorted(optim._BY_NAME))
            raise ConfigError(f"[table] optimizer is one of {known}, got {self.optimizer!r}")
        options = dict(self.optimizer_options)
        if self.optimizer == "adagrad":
            options.setdefault("initial_accumulator", 0.0)  # the loss is a mean: gradients are small beside TF's 0.1
        try:
            return optim._BY_NAME[self.optimizer](lr=self.lr, **options)
        except TypeError as error:
            raise ConfigError(f"[table] optimizer_options: {error}") from None

    def arguments(self) -> dict[str, Any]:
        """The keywords of `shoal.HashTable`, and of the tables that stand in its place."""
        from shoal.table.initializers import RandomUniformInitializer, ZerosInitializer

        scale = self.init_scale
        return {
            "optimizer": self.row_optimizer(),
            "initializer": RandomUniformInitializer(-scale, scale) if scale else ZerosInitializer(),
            "expire_after": self.expire_after,
            "name": self.name,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """``[model]``: its name and the options of its class."""

    name: str = "deepfm"
    """deepfm, dlrm, dcn, two_tower, or package.module:Class of yours."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """``[train]``: the loop."""

    epochs: int = 1
    batch_size: int = 4096
    """Of each rank."""
    lr: float = 0.001
    """Of the dense part."""
    optimizer: Literal["adam", "adamw", "adagrad", "sgd"] = "adam"
    """Of the dense part."""
    max_steps: int | None = None
    seed: int = 0
    device: str = "cpu"
    """Where the dense part computes; rows stay in host memory."""
    threads: int | None = None
    """Of torch and of the tables; by default all CPUs."""
    strict: bool = False
    """A bad row ends the run."""
    ps: tuple[str, ...] = ()
    """Addresses of parameter servers that hold the rows, all of them in the order of their shards."""
    ps_deadline_s: float = 600.0
    """How long a parameter server may be away."""

    def __post_init__(self) -> None:
        _at_least(self, epochs=1, batch_size=1, lr=0, max_steps=1, threads=1, ps_deadline_s=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """``[eval]``: when to evaluate, and when to give up."""

    every_steps: int = 0
    """0: at the end of each epoch."""
    metric: Literal["auc", "logloss"] = "auc"
    patience: int = 0
    """Stop after so many evaluations without a new best; 0 never stops."""
    max_batches: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, every_steps=0, patience=0, max_batches=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutConfig:
    """``[out]``: checkpoints and what is reported."""

    dir: str | None = None
    """Folder for checkpoints; without it nothing is kept."""
    every_steps: int = 0
    """Steps between checkpoints; 0 for none but by time and at the end."""
    every_s: float = 600.0
    """Seconds between checkpoints; 0 for none but by steps and at the end. With several ranks steps decide."""
    keep: int = 2
    """Checkpoints that stay."""
    log_steps: int = 100
    """Steps between two reports."""
    auc_window: int = 100_000
    """Samples of the exact AUC."""
    tensorboard: str | None = None
    """Folder for TensorBoard's summaries."""

    def __post_init__(self) -> None:
        _at_least(self, every_steps=0, every_s=0, keep=1, log_steps=1, auc_window=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole run."""

    data: DataConfig
    table: TableConfig = TableConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    out: OutConfig = OutConfig()

    def __post_init__(self) -> None:
        if self.eval.patience and not self.data.eval:
            raise ConfigError("[eval] patience needs files to evaluate on; name them with [data] eval")

    def identity(self) -> dict[str, Any]:
        """What must be the same where a checkpoint goes on: everything that its tensors and its position depend on."""
        schema = self.data.schema().to_json()
        table = {name: value for name, value in asdict(self.table).items() if name not in ("lr", "expire_after")}
        reading = {"batch_size": self.train.batch_size, "shuffle_rows": self.data.shuffle_rows}
        return {
            "schema": schema, "table": table, "model": asdict(self.model), "optimizer": self.train.optimizer,
            "seed": self.train.seed, "format": self.data.format, "reading": reading,
        }  # fmt: skip


_SECTION: dict[type, str] = {
    DataConfig: "data", TableConfig: "table", ModelConfig: "model", TrainConfig: "train", EvalConfig: "eval",
    OutConfig: "out",
}  # fmt: skip
_SECTIONS = {name: section for section, name in _SECTION.items()}


def load_config(path: str | Path | None, changes: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a TOML file, with ``changes`` such as ``{"train.epochs": 2}`` over it.

    Paths in the file are relative to it, those in changes to the working directory.
    """
    content: dict[str, Any] = {}
    if path is not None:
        try:
            with open(path, "rb") as file:
                content = tomllib.load(file)
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {str(path)!r} ({error.strerror or error})") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not a TOML file: {error}") from None
        _resolve_paths(content, Path(path).parent)
    for key, value in (changes or {}).items():
        section, _, name = key.partition(".")
        if not name:
            raise ConfigError(f"settings are section.name, such as train.epochs, got {key!r}")
        inner = content.setdefault(section, {})
        *outer, last = name.split(".")
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return _config(content, str(path) if path is not None else "the configuration")


def _config(content: Mapping[str, Any], where: str) -> Config:
    unknown = sorted(set(content) - set(_SECTIONS))
    if unknown:
        raise ConfigError(f"{where}: there is no section [{unknown[0]}]; sections are {', '.join(_SECTIONS)}")
    if "data" not in content:
        raise ConfigError(f'{where}: [data] with train = ["FILE", …] is missing')
    made = {name: _section(_SECTIONS[name], value, name, where) for name, value in content.items()}
    return Config(**made)


def _section(kind: type[T], content: Any, name: str, where: str) -> T:
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where}: [{name}] is a section, got {content!r}")
    hints = typing.get_type_hints(kind)
    names = [f.name for f in fields(kind)]  # pyrefly: ignore[bad-argument-type]
    # What a section does not know goes to its options, where it has them: of the model or of the format.
    given, extra = {}, {}
    for key, value in content.items():
        (given if key in names else extra)[key] = value
    if extra:
        if "options" not in names:
            raise ConfigError(f"{where}: [{name}] knows no {next(iter(extra))!r}; it knows {', '.join(names)}")
        given["options"] = {**given.get("options", {}), **extra}
    for one in fields(kind):  # pyrefly: ignore[bad-argument-type]
        if one.default is MISSING and one.default_factory is MISSING and one.name not in given:
            raise ConfigError(f"{where}: [{name}] {one.name} is missing")
    values = {key: _convert(value, hints[key], f"{where}: [{name}] {key}") for key, value in given.items()}
    return kind(**values)


def _convert(value: Any, hint: Any, where: str) -> Any:
    """A TOML value as the type that a field has."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _convert(value, next(kind for kind in inner if kind is not type(None)), where)
    if origin is Literal:
        if value not in inner:
            raise ConfigError(f"{where} is one of {', '.join(map(repr, inner))}, got {value!r}")
        return value
    if origin is tuple:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"{where} is a list of texts, got {value!r}")
        return tuple(value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is a table, got {value!r}")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        raise ConfigError(f"{where} is {names.get(hint, hint)}, got {value!r}")
    return value


def _resolve_paths(content: dict[str, Any], base: Path) -> None:
    for section, names in (("data", ("train", "eval")), ("out", ("dir", "tensorboard"))):
        inner: Any = content.get(section)
        for name in names if isinstance(inner, dict) else ():
            value = inner.get(name)
            if isinstance(value, str):
                inner[name] = str(base / value)
            elif isinstance(value, list):
                inner[name] = [str(base / one) if isinstance(one, str) else one for one in value]


def with_threads(config: Config, threads: int) -> Config:
    """The same run on so many threads."""
    return replace(config, train=replace(config.train, threads=threads))
