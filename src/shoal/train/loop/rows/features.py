"""How the features of a run are pooled, and served from raw values."""

from __future__ import annotations

from dataclasses import replace

from shoal.nn.feature_rows import Pooling
from shoal.serving.export.features import ServedFeatures
from shoal.train.loop.config import Config


def pooling_of(config: Config) -> dict[str, Pooling]:
    """How the features of a run are pooled, in the order of the data."""
    where = {feature: one.config for one in config.tables() for feature in one.features}
    made = {}
    for feature in config.data.schema().sparse:
        own = config.table.of_feature(feature)
        table = where[feature]
        made[feature] = Pooling(table=table.name, dim=table.dim, combiner=own.combiner, max_length=own.length)
    return made


def served_features(config: Config) -> ServedFeatures:
    """How servers turn raw values into the model's inputs, as the run's reader does."""
    form, schema = config.data.make_format(), config.data.schema()
    if config.data.format in ("example", "example_batch"):  # their records contain ids
        schema = replace(schema, raw=True)
    separator = str(getattr(form, "separator", "") or "")
    lists = bool(getattr(form, "lists", False)) or (config.data.format == "tfrecord")
    lists = lists or (bool(form.ragged) and not separator and not schema.native().listed)
    return ServedFeatures(schema=schema, pooling=pooling_of(config), lists=lists, separator=separator)
