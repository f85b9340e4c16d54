"""The features of an export: how raw values become ids and numbers, and how ids become the net's input rows.

They are stored as the manifest's ``features``: ``schema`` (`shoal.data.Schema`), ``lists`` and ``separator`` as used to
read the training data, ``pooling`` (`shoal.nn.feature_rows.Pooling` by feature), and ``words``, the vocabulary file of
each feature.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from shoal.data.features import read_words
from shoal.data.raw import InputMaker
from shoal.data.schema import Schema
from shoal.errors import ConfigError, DataError
from shoal.nn.feature_rows import Pooling
from shoal.serving.export.manifest import SignatureSpec, TensorSpec, inside

IDS = "ids"
"""The signature for ids; ``serving_default`` is for raw values."""
LENGTHS = "/lengths"
"""Suffix of a list's name for the input that holds the number of values in each row."""
OUTPUTS = ("logit", "probability")
_DTYPES = {"text": "string", "vocabulary": "string", "id": "int64", "bucket": "float", "log": "float"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFeatures:
    """The features of a model trained by `shoal train`."""

    schema: Schema
    pooling: Mapping[str, Pooling]
    lists: bool = False
    separator: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    """Feature -> its vocabulary file, relative to the export's directory."""

    def makers(self) -> dict[str, InputMaker]:
        """Signature -> the maker of the net's inputs from its requests."""
        return {
            name: InputMaker(self.schema, lists=self.lists, separator=self.separator, ready=name == IDS)
            for name in ("serving_default", IDS)
        }

    def to_json(self) -> dict[str, Any]:
        """The JSON form that `read` accepts, including the vocabularies' words."""
        return {
            "schema": self.schema.to_json(), "lists": self.lists, "separator": self.separator,
            "pooling": {name: asdict(one) for name, one in self.pooling.items()}, "words": {},
        }  # fmt: skip

    def write(self, directory: Path) -> dict[str, Any]:
        """Write the vocabularies into an export's directory and return its manifest's ``features``."""
        made, files = self.to_json(), {}
        schema = made["schema"]
        for number, (name, given) in enumerate(schema.get("definitions", {}).items()):
            words = given.get("words")
            if not words or any("\n" in word or "\r" in word for word in words):
                continue
            files[name] = f"assets.extra/vocabulary_{number}.txt"
            (directory / "assets.extra").mkdir(exist_ok=True)
            (directory / files[name]).write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
            given["words"] = []
        return made | {"words": files}

    @classmethod
    def read(cls, given: Mapping[str, Any], directory: Path) -> Self:
        """Read what `write` wrote; raises DataError if it cannot be read."""
        try:
            schema = {**given["schema"], "definitions": dict(given["schema"].get("definitions", {}))}
            for name, file in given["words"].items():
                path = inside(directory, directory / file)
                schema["definitions"][name] = {
                    **schema["definitions"][name], "words": list(read_words(os.fspath(path), name))
                }  # fmt: skip
            return cls(
                schema=Schema.from_json(schema), lists=bool(given["lists"]), separator=str(given["separator"]),
                words=dict(given["words"]),
                pooling={name: Pooling(**one) for name, one in given["pooling"].items()},
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise DataError(f"{directory}: the manifest's features are malformed: {error!r}") from None

    def signatures(self, outputs: Mapping[str, TensorSpec], row_wise: bool | None) -> dict[str, SignatureSpec]:
        """The signatures in the metadata: raw inputs and id inputs. The values of an omitted input count as missing."""
        made = {}
        for name, maker in self.makers().items():
            inputs: dict[str, TensorSpec] = {}
            for feature, column in maker.columns.items():
                if column and column not in inputs:
                    kind = "id" if maker.ready else self.schema.feature(feature).kind
                    inputs[column] = TensorSpec(_DTYPES[kind], [None, None] if feature in maker.listed else [None])
            for number in self.schema.dense:
                inputs.setdefault(self.schema.column(number), TensorSpec("float", [None]))
            made[name] = SignatureSpec(inputs, dict(outputs), row_wise)
        return made
