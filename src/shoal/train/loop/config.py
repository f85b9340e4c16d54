"""The configuration of a training run: frozen sections whose values are checked on construction."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shoal import _core
from shoal.data.features import Number
from shoal.data.live.address import is_live, parse_address
from shoal.data.live.messages import decoder
from shoal.data.schema import CRITEO, Schema
from shoal.errors import ConfigError, did_you_mean
from shoal.observe.security import ServerSecurity, split_address, token_file
from shoal.train.loop.serve_config import ServeConfig
from shoal.train.loop.table_config import (
    PlannedTable,
    TableConfig,
    at_least,
    check_features,
    owner,
    plan_tables,
    shared_slots,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """``[data]``: the files and their columns. The format ``criteo`` defines the columns itself."""

    train: tuple[str, ...]
    """Paths, folders and glob patterns, relative to the configuration; and live sources, which are read after the
    files: redis://HOST/STREAM, kafka://HOST/TOPIC, dir:FOLDER (a growing folder), join:FILE.toml (a join of two
    streams) and - (standard input)."""
    eval: tuple[str, ...] = ()
    """Files for evaluation and early stopping, never for training."""
    format: str = "criteo"
    """The format of files and messages: criteo, csv, tsv, json, parquet, tfrecord, example or example_batch."""
    label: str = ""
    dense: tuple[str, ...] | None = None
    sparse: tuple[str, ...] | None = None
    time: str | None = None
    slots: dict[str, int] = field(default_factory=dict)
    raw: bool = False
    positive_above: float | None = None
    log_dense: bool | None = None
    keep_negatives: float = 1.0
    """The share of negatives that was kept in the training data, as set by ``keep_negatives`` of `shoal join`. Served
    scores and evaluations are corrected for it."""
    shuffle_rows: int = 65536
    """Rows held in memory and shuffled; 0 keeps the order. Raise it when neighbouring rows in the files are similar."""
    prefetch: int | None = None
    """Batches that a thread reads ahead; 0 reads between steps, on all threads. By default 4 for live sources, 8 for
    files; with at most two CPUs 0 for files, until steps wait for reading: a parsing thread would slow them more."""
    message_format: str | None = None
    """The format of messages, and of files in growing directories, if it differs from ``format``; by default
    ``format``, or json if that is parquet and one of the sources is not a directory."""
    max_wait_s: float = 1.0
    """For live sources: how long a partial batch waits for more records; inf for full batches only. Lower it when
    replicas get updates too late, raise it when batches are too small."""
    idle_s: float | None = None
    """For live sources: the run ends after waiting this long for a record, if they answer; by default it waits
    forever."""
    dead_letters: str | None = None
    """A file for messages that cannot be read; by default dead-letters.jsonl in ``out.dir``."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the format: columns, delimiter, quote, separator, max_line_bytes, part_bytes, lists."""
    features: dict[str, Any] = field(default_factory=dict)
    """Definitions of features and numbers by name (`shoal.data.Feature`, `shoal.data.Number`); in a TOML file, the
    sections ``[features.NAME]``. Those that ``sparse`` and ``dense`` do not name come after those that they name."""

    def __post_init__(self) -> None:
        at_least("data", self, shuffle_rows=0, prefetch=0, idle_s=0)
        if not self.max_wait_s >= 0:
            raise ConfigError(f"[data] max_wait_s must be at least 0, or inf, got {self.max_wait_s}")
        if not self.train:
            raise ConfigError("[data] train must name the files to train on, got none")
        for text in self.live:
            parse_address(text)
        if any(map(is_live, self.eval)):
            raise ConfigError(f"[data] eval must be files, got a live source: {', '.join(filter(is_live, self.eval))}")
        form = self.make_format()
        if self.live:
            name, messages = self.make_message_format()
            decoder(messages, name)
            if messages.ragged != form.ragged:
                raise ConfigError(
                    f"[data] files ({self.format}) and messages ({name}) must agree on whether features are lists; set "
                    "lists = true, a separator, or neither"
                )

    @property
    def history(self) -> tuple[str, ...]:
        """The files of ``train``."""
        return tuple(one for one in self.train if not is_live(one))

    @property
    def live(self) -> tuple[str, ...]:
        """The live sources of ``train``."""
        return tuple(one for one in self.train if is_live(one))

    def schema(self) -> Schema:
        criteo = self.format == "criteo"
        log_dense = criteo if self.log_dense is None else self.log_dense
        label, dense, sparse = self.label, self.dense, self.sparse
        if criteo:
            label = label or CRITEO.label
            dense, sparse = (CRITEO.dense if dense is None else dense, CRITEO.sparse if sparse is None else sparse)
        named = {name: isinstance(given, Number) for name, given in self.features.items()}
        dense = dict.fromkeys([*(dense or ()), *(name for name, number in named.items() if number)])
        sparse = dict.fromkeys([*(sparse or ()), *(name for name, number in named.items() if not number)])
        return Schema(
            label=label, dense=tuple(dense), sparse=tuple(sparse), time=self.time, slots=self.slots, raw=self.raw,
            positive_above=self.positive_above, log_dense=log_dense, definitions=self.features,
            keep_negatives=self.keep_negatives,
        )  # fmt: skip

    def make_format(self) -> Any:
        """The format of files; without files, of messages."""
        files = self.history or self.eval
        return self._make_format("format", self.format) if files else self.make_message_format()[1]

    def make_message_format(self) -> tuple[str, Any]:
        """The name of the format of messages, and the format."""
        files = all(parse_address(one).scheme == "dir" for one in self.live)  # files in a directory can have any format
        name = self.message_format or ("json" if self.format == "parquet" and not files else self.format)
        return name, self._make_format("message_format", name)

    def _make_format(self, setting: str, name: str) -> Any:
        from shoal.data.formats import FORMATS, make_format

        if name not in FORMATS:
            hint = did_you_mean(name, FORMATS)
            raise ConfigError(f"[data] {setting} must be one of {', '.join(FORMATS)}, got {name!r}{hint}")
        options, known = dict(self.options), FORMATS[name][1]
        if "threads" in known:
            options.setdefault("threads", not self.ahead())
        if self.live:  # each of the two formats gets only its own options
            both = known | FORMATS.get(self.message_format or "json", FORMATS["json"])[1] | FORMATS[self.format][1]
            options = {key: value for key, value in options.items() if key in known or key not in both}
        return make_format(name, self.schema(), **options)

    def ahead(self) -> int:
        """Batches to read ahead."""
        if self.prefetch is not None:
            return self.prefetch
        if self.live:
            return 4  # a separate thread waits for records
        return 8 if _core.num_threads() > 2 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """``[model]``: the name of the model and the options of its class."""

    name: str = "deepfm"
    """deepfm, dlrm, dcn, two_tower, or your own package.module:Class."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """``[train]``: the loop."""

    epochs: int = 1
    batch_size: int = 4096
    """Samples per batch, on each rank."""
    lr: float = 0.001
    """Learning rate of the dense part."""
    optimizer: Literal["adam", "adamw", "adagrad", "sgd"] = "adam"
    """Optimizer of the dense part."""
    schedule: Literal["constant", "linear", "cosine", "step"] = "constant"
    """How learning rates, of the dense part and of rows, fall after the warm-up: to ``lr_end`` times their initial
    value at ``schedule_steps``, or by the factor ``decay`` every ``decay_every`` steps."""
    warmup_steps: int = 0
    """Steps during which rates rise from near 0. Raise it when the loss jumps at the beginning."""
    schedule_steps: int | None = None
    """The last step of ``linear`` and ``cosine``; by default ``max_steps``."""
    lr_end: float = 0.0
    """The smallest factor that a schedule reaches."""
    decay_every: int | None = None
    decay: float = 0.1
    """For the schedule ``step``: the factor by which rates fall every ``decay_every`` steps."""
    accumulate: int = 1
    """Batches whose gradients are accumulated for one step: N batches of B samples act as one of N * B, in the memory
    of one batch."""
    amp: Literal["off", "bf16"] = "off"
    """``bf16``: the dense part computes in bfloat16 where that is safe (torch.autocast); weights and rows do not."""
    max_steps: int | None = None
    seed: int = 0
    device: str = "cpu"
    """Device of the dense part; that of the rows is ``[table] device``."""
    threads: int | None = None
    """Threads for torch and for the tables; by default all CPUs."""
    strict: bool = False
    """Whether a bad row ends the run."""
    hooks: tuple[str, ...] = ()
    """``package.module:Hook`` …, called around every step: subclasses of `shoal.train.SessionRunHook`, or functions
    that take the `Trainer` and return one; ``mlflow`` and ``wandb`` record settings and metrics there."""
    ps: tuple[str, ...] = ()
    """Addresses of the parameter servers that hold the rows, in the order of their shards."""
    ps_deadline_s: float = 600.0
    """How long a parameter server can be unreachable."""
    pipeline: bool = True
    """Read the next batches (``data.prefetch``) and exchange their ids with other ranks or servers while a step
    computes. Results are bit-identical. Turn it off to see where time goes."""
    staleness: int = 0
    """Number of steps by which rows are read early, so that reads and updates overlap the dense part. Set it to 1 when
    steps wait for parameter servers or other ranks, and compare evaluations: rows then miss one update."""
    ps_restore: bool = True
    """Whether resuming from a checkpoint restores the rows on the servers. Turn it off if other runs share them."""

    def __post_init__(self) -> None:
        at_least(
            "train", self, epochs=1, batch_size=1, lr=0, max_steps=1, threads=1, ps_deadline_s=0, warmup_steps=0,
            schedule_steps=1, lr_end=0, decay_every=1, decay=0, accumulate=1, staleness=0,
        )  # fmt: skip
        if self.staleness and not self.pipeline:
            raise ConfigError(f"[train] staleness = {self.staleness} needs pipeline = true")
        if self.lr_end > 1:
            raise ConfigError(
                f"[train] lr_end must be at most 1, because it is a share of the learning rate, got {self.lr_end}"
            )
        if self.schedule == "step" and self.decay_every is None:
            raise ConfigError(
                '[train] schedule = "step" needs decay_every, the number of steps after which learning rates fall'
            )
        if self.schedule in ("linear", "cosine") and self.schedule_steps is None and self.max_steps is None:
            raise ConfigError(
                f'[train] schedule = "{self.schedule}" needs schedule_steps (or max_steps), the step where it ends'
            )
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ConfigError(f"[train] seed must be a 64-bit integer, got {self.seed}")

    @property
    def scheduled(self) -> bool:
        """Whether learning rates change."""
        return self.schedule != "constant" or self.warmup_steps > 0

    @property
    def defers(self) -> bool:
        """Whether rows are updated together with the dense part at the end of a step, instead of in backward."""
        return self.accumulate > 1 or self.scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """``[eval]``: when to evaluate, and when to stop early."""

    every_steps: int = 0
    """Steps between evaluations; 0 evaluates at the end of each epoch."""
    every_s: float = 0.0
    """Seconds between evaluations of a run on live sources; 0 disables them."""
    metric: Literal["auc", "logloss", "pr_auc", "gauc", "ndcg"] = "auc"
    """The metric by which evaluations are compared. ``gauc`` and ``ndcg`` need a ``group``."""
    group: str | None = None
    """The feature, such as the user, whose first id groups samples for GAUC (AUC per group, averaged) and NDCG."""
    ndcg_at: int = 10
    """The number of ranked positions that NDCG counts."""
    patience: int = 0
    """Stop after this many evaluations without a new best, and end with the best model, which is kept in a checkpoint
    in ``out.dir``; 0 never stops."""
    max_batches: int | None = None
    keep_negatives: float | None = None
    """The share of negatives that was kept in the evaluation data; by default as in ``[data]``. Set it to 1 if that
    data has all negatives, so that logloss and calibration are those of served scores."""

    def __post_init__(self) -> None:
        at_least("eval", self, every_steps=0, every_s=0, patience=0, max_batches=1, ndcg_at=1)
        if self.keep_negatives is not None and not 0 < self.keep_negatives <= 1:
            raise ConfigError(f"[eval] keep_negatives must be above 0 and at most 1, got {self.keep_negatives}")
        if self.metric in ("gauc", "ndcg") and self.group is None:
            raise ConfigError(f'[eval] metric = "{self.metric}" needs a group, such as group = "user"')

    @property
    def sign(self) -> int:
        """The factor that makes higher values of the metric better: 1 or -1."""
        return -1 if self.metric == "logloss" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OutConfig:
    """``[out]``: checkpoints and reports."""

    dir: str | None = None
    """Folder for checkpoints; without it nothing is kept."""
    every_steps: int = 0
    """Steps between checkpoints; 0 disables these. A run always ends with a checkpoint."""
    every_s: float = 600.0
    """Seconds between checkpoints, by the first rank's clock; 0 disables these."""
    keep: int = 2
    """Checkpoints to keep, in addition to the best one if ``patience`` or ``keep_best`` is set."""
    keep_best: bool = False
    """Keep the checkpoint of the best evaluation until there is a better one."""
    log_steps: int = 100
    """Steps between two reports."""
    log_s: float = 10.0
    """Seconds after which a run on live sources reports even if ``log_steps`` was not reached."""
    auc_window: int = 100_000
    """The number of latest samples for the exact AUC."""
    tensorboard: str | None = None
    """Folder for TensorBoard's summaries."""
    metrics: str | None = None
    """``host:port`` at which the first rank serves its status page and /metrics, for Prometheus and `shoal top`; port 0
    picks a free one. ``off`` disables it. Default: off in Python, a free port of 127.0.0.1 for `shoal train`."""
    metrics_tls_cert: str | None = None
    """Certificate chain (PEM) of the status page. Off loopback the page must have TLS, and tokens or a client CA."""
    metrics_tls_key: str | None = None
    metrics_tls_client_ca: str | None = None
    """Callers must present a certificate signed by this CA."""
    metrics_tokens: str | None = None
    """File of lines ``identity token``; callers must send one of the tokens."""
    metrics_insecure: bool = False
    """Serve the status page off loopback even without TLS and tokens."""

    def __post_init__(self) -> None:
        at_least("out", self, every_steps=0, every_s=0, keep=1, log_steps=1, log_s=0, auc_window=1)
        if self.page is None:
            return
        try:
            split_address(self.page)
        except ConfigError:
            raise ConfigError(
                f"[out] metrics must be host:port, such as 127.0.0.1:9100, or off, got {self.metrics!r}"
            ) from None
        if not self.page.rpartition(":")[0]:
            raise ConfigError(f"[out] metrics must be host:port, such as 127.0.0.1:9100, got {self.metrics!r}")

    @property
    def page(self) -> str | None:
        """The address of the status page; None if it is off."""
        return None if self.metrics in (None, "off") else self.metrics

    def security(self) -> ServerSecurity:
        """The certificates and tokens of the status page."""
        names = (self.metrics_tls_cert, self.metrics_tls_key, self.metrics_tls_client_ca)
        certificate, key, ca = (Path(each) if each is not None else None for each in names)
        tokens = token_file(Path(self.metrics_tokens)) if self.metrics_tokens is not None else {}
        security = ServerSecurity(
            certificate=certificate, key=key, client_ca=ca, tokens=tokens, allow_insecure=self.metrics_insecure
        )
        if self.page is not None:
            names = "metrics_tls_cert, metrics_tls_key, and metrics_tokens or metrics_tls_client_ca"
            security.check_bind(self.page, f"[out] {names}, or metrics_insecure = true")
        return security


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The configuration of a run."""

    data: DataConfig
    table: TableConfig = field(default_factory=TableConfig)
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    out: OutConfig = OutConfig()
    serve: ServeConfig = field(default_factory=ServeConfig)

    def __post_init__(self) -> None:
        if self.eval.patience and not self.data.eval:
            raise ConfigError("[eval] patience needs files to evaluate on; name them with [data] eval")
        if self.serve.when_better and not self.data.eval:
            raise ConfigError("[serve] when_better needs files to evaluate on; name them with [data] eval")
        if self.out.keep_best and (not self.data.eval or self.out.dir is None):
            raise ConfigError("[out] keep_best needs [data] eval to find the best step, and [out] dir to keep it in")
        if self.serve.guard.active and self.serve.guard.window > self.out.auc_window:
            raise ConfigError(
                f"[serve.guard] window must be at most [out] auc_window = {self.out.auc_window}, the number of samples "
                f"kept, got {self.serve.guard.window}"
            )
        sparse = self.data.schema().sparse
        if self.eval.group is not None and self.eval.group not in sparse:
            raise ConfigError(
                f"[eval] group must be a feature, got {self.eval.group!r}{did_you_mean(self.eval.group, sparse)}; "
                f"features are {', '.join(sparse)}"
            )
        if self.train.ps and any(one.config.shard != "row" for one in self.tables()):
            raise ConfigError('[table] shard must be "row" with [train] ps, because the servers have the rows')
        if self.table.device == "cuda" and self.train.ps:
            raise ConfigError(
                '[table] device is "cuda", but with [train] ps the rows are on the servers; leave one of them out'
            )
        if not self.table.features:
            return
        schema = self.data.schema()
        check_features(self.table, schema.sparse, schema.slots, schema.raw)
        if not schema.raw:
            slots = shared_slots(self.table, schema.sparse, schema.slots)
            object.__setattr__(self, "data", replace(self.data, slots=slots))

    def tables(self) -> list[PlannedTable]:
        """The tables of the run."""
        return plan_tables(self.table, self.data.schema().sparse)

    def eval_log_odds(self) -> float:
        """The term to add to the model's logits for evaluation data with another share of negatives."""
        kept = self.eval.keep_negatives
        return 0.0 if kept is None else math.log(self.data.keep_negatives / kept)

    def expires(self) -> bool:
        """Whether rows of some table expire."""
        return any(one.config.expire_after is not None for one in self.tables())

    def identity(self) -> dict[str, Any]:
        """The settings that must match to resume a checkpoint: all that its tensors and its position depend on."""
        schema = self.data.schema().to_json()
        table = self.table.identity()
        if self.table.features:
            names = {feature: one.config.name for one in self.tables() for feature in one.features}
            own = [name for name in schema["sparse"] if name in self.table.features]
            table["features"] = {name: _of_feature(self.table, name, names[name]) for name in own}
        reading = {"batch_size": self.train.batch_size, "shuffle_rows": self.data.shuffle_rows}
        return {
            "schema": schema, "table": table, "model": asdict(self.model), "optimizer": self.train.optimizer,
            "seed": self.train.seed, "format": self.data.format, "reading": reading,
        }  # fmt: skip


def _of_feature(table: TableConfig, feature: str, name: str) -> dict[str, Any]:
    """The settings of a feature in ``[table.features]`` that a checkpoint depends on."""
    lent = owner(table, feature)
    settings = (table if lent is None else table.of_feature(lent)).identity()
    own = table.of_feature(feature)
    return {**settings, "combiner": own.combiner, "max_length": own.max_length, "name": name}
