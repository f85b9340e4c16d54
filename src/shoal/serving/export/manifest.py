"""`manifest.json`: describes the contents of an exported directory."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.durable import MANIFEST, Saved, digests_below, read_saved, write_saved
from shoal.errors import DataError
from shoal.stamps import Stamp

FORMAT = 1
FILE = MANIFEST


@dataclass(slots=True)
class TensorSpec:
    """dtype by name (``int64``) and shape; a size of None means any. ``padding``: the id that pads short rows."""

    dtype: str
    shape: list[int | None] | None = None
    padding: int | None = None


@dataclass(slots=True)
class SignatureSpec:
    inputs: dict[str, TensorSpec] = field(default_factory=dict)
    outputs: dict[str, TensorSpec] = field(default_factory=dict)
    row_wise: bool | None = None
    """Whether requests may be joined: each output row depends only on its own input row. None: not checked."""


@dataclass(slots=True)
class TableSpec:
    """A table of an export. ``asset_dir`` is relative to the export's directory."""

    name: str
    kind: str  # hash or multi
    sub_tables: list[str]
    dims: list[int]
    asset_prefix: str
    asset_dir: str
    slots: dict[str, str] = field(default_factory=dict)
    """alias of the lookup signature -> sub-table (for a hash table, the table itself)."""
    configs: list[str] = field(default_factory=list)
    """Serialised ``EmbeddingHashTableConfig`` (base64) of each sub-table: how rows are stored while serving."""


@dataclass(slots=True)
class Manifest:
    """One exported sub-graph."""

    model_name: str
    sub_graph: str
    version: int
    global_step: int
    signatures: dict[str, SignatureSpec] = field(default_factory=dict)
    tables: list[TableSpec] = field(default_factory=list)
    tags: list[str] = field(default_factory=lambda: ["serve"])
    format: int = FORMAT
    program: dict[str, Any] | None = None
    """The dense program: its file, its features and where their rows come from. None in embedding shards."""
    rows_read_at: float | None = None
    """Unix time at which the export began to read the tables' rows; rows pushed later are newer. None: unknown."""

    stamps: dict[str, Stamp] = field(default_factory=dict)
    """How new the rows and weights are: the stamp of each training source, such as ``trainer`` or ``ps_0``."""
    features: dict[str, Any] | None = None
    """How raw values become inputs: see `shoal.serving.export.features`. None: inputs are ids."""
    save: str = ""
    """Identifies the distributed export that all of its folders share; see `shoal.serving.export.whole`."""
    parts: list[str] = field(default_factory=list)
    """The sub-graphs of that export."""

    def fields(self) -> dict[str, Any]:
        """The manifest's fields, for `shoal.durable.Draft.seal`."""
        order = (
            "format",
            "model_name",
            "sub_graph",
            "version",
            "global_step",
            "tags",
            "signatures",
            "tables",
            "program",
            "rows_read_at",
            "stamps",
            "features",
            "save",
            "parts",
        )
        content = asdict(self)
        for signature in content["signatures"].values():
            if signature["row_wise"] is None:
                del signature["row_wise"]
            for spec in (*signature["inputs"].values(), *signature["outputs"].values()):
                if spec["padding"] is None:
                    del spec["padding"]
        optional = ("stamps", "features", "save", "parts")
        return {key: content[key] for key in order if content[key] or key not in optional}

    def write(self, directory: Path) -> None:
        """Write the manifest of a directory whose other files are complete."""
        files = {name: digest for name, digest in digests_below(directory).items() if name != FILE}
        write_saved(directory / FILE, self.fields(), files)

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read a manifest; raises DataError, naming the file, if it is missing, damaged or not an export's."""
        file = directory / FILE
        try:
            return cls.of(read_saved(file, unsealed=True))
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}") from None

    @classmethod
    def of(cls, saved: Saved) -> "Manifest":
        """Parse a manifest that was read; raises DataError if it is not an export's."""
        file, content = saved.manifest, saved.fields
        try:
            if content["format"] != FORMAT:
                raise DataError(f"{file} has format {content['format']}; this version reads format {FORMAT}")
            signatures = {
                name: SignatureSpec(_specs(each["inputs"]), _specs(each["outputs"]), each.get("row_wise"))
                for name, each in content["signatures"].items()
            }
            tables = [
                TableSpec(**{key: each[key] for key in TableSpec.__dataclass_fields__ if key in each})
                for each in content["tables"]
            ]
            return cls(
                model_name=content["model_name"],
                sub_graph=content["sub_graph"],
                version=int(content["version"]),
                global_step=int(content["global_step"]),
                signatures=signatures,
                tables=tables,
                tags=list(content.get("tags", ["serve"])),
                program=content.get("program"),
                rows_read_at=float(read_at) if (read_at := content.get("rows_read_at")) is not None else None,
                stamps={source: Stamp(*map(int, stamp)) for source, stamp in content.get("stamps", {}).items()},
                features=content.get("features"),
                save=str(content.get("save", "")),
                parts=[str(part) for part in content.get("parts", ())],
            )
        except DataError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise DataError(f"{file} is not a manifest of format {FORMAT}: {error!r}") from None


def _specs(given: dict[str, Any]) -> dict[str, TensorSpec]:
    return {alias: TensorSpec(each["dtype"], each["shape"], each.get("padding")) for alias, each in given.items()}


def inside(root: Path, path: Path) -> Path:
    """Resolve ``path``, which must be inside ``root``.

    Raises:
        DataError: it leads outside, through ``..``, an absolute path or a symbolic link.
    """
    resolved = path.resolve()
    if not resolved.is_relative_to(root.resolve()):
        raise DataError(f"{path} is outside {root}; a model's files must be inside its root")
    return resolved
