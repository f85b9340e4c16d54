"""The files that ``shoal up --init`` writes: an example configuration, and clicks to learn from."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import ConfigError

ROWS = 200_000
FILE = """\
# shoal up online.toml
# A complete system on one machine: a parameter server, a trainer, two replicas. `shoal up --init DIR` writes this file
# and clicks to learn from. Paths are relative to this file; output goes to online.run/ by default (docs/online.md).

[data]
format = "criteo"              # or csv, tsv, parquet, …
train = ["clicks.tsv"]         # files; a stream never ends: "redis://127.0.0.1:6379/clicks"

[table]
dim = 16
lr = 0.02

[train]
batch_size = 1024
epochs = 1000                  # files are read repeatedly; stop with Ctrl-C

[servers]
count = 1

[replicas]
count = 2
# rest_port = 8501             # and 8502; without it the system chooses

[serve.guard]                  # pushes stop when the model gets worse
min_auc = 0.55
calibration = [0.5, 2.0]
"""


def write_example(folder: Path) -> Path:
    """Write ``online.toml`` and ``clicks.tsv`` into a folder; returns the path of ``online.toml``.

    Raises:
        ConfigError: ``online.toml`` exists, or the folder cannot be written.
    """
    from shoal.data.generate import CriteoLike, write_criteo

    target = folder / "online.toml"
    if target.exists():
        raise ConfigError(f"--init: {target} already exists; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_criteo(folder / "clicks.tsv", CriteoLike(rows=ROWS, seed=1))
        target.write_text(FILE)
    except OSError as error:
        raise ConfigError(f"--init: cannot write to {str(folder)!r} ({error.strerror or error})") from None
    return target
