"""What ``shoal up --init`` writes: a file to begin with, and clicks to learn from."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import ConfigError

ROWS = 200_000
FILE = """\
# shoal up online.toml
# A whole system on one machine: a parameter server, a trainer, two replicas. `shoal up --init DIR` writes this file and
# clicks to begin with. Paths are relative to this file; what it does not say is in online.run/ (docs/online.md).

[data]
format = "criteo"              # or csv, tsv, parquet, …
train = ["clicks.tsv"]         # files; a stream never ends: "redis://127.0.0.1:6379/clicks"

[table]
dim = 16
lr = 0.02

[train]
batch_size = 1024
epochs = 1000                  # files are read again and again; stop with Ctrl-C

[servers]
count = 1

[replicas]
count = 2
# rest_port = 8501             # and 8502; without it the system chooses

[serve.guard]                  # pushes stop by themselves when the model turns bad
min_auc = 0.55
calibration = [0.5, 2.0]
"""


def write_example(folder: Path) -> Path:
    """Writes ``online.toml`` and ``clicks.tsv`` into a folder; the path of the former.

    Raises:
        ConfigError: there is such a file, or the folder cannot be written.
    """
    from shoal.data.generate import CriteoLike, write_criteo

    target = folder / "online.toml"
    if target.exists():
        raise ConfigError(f"--init: {target} exists already; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_criteo(folder / "clicks.tsv", CriteoLike(rows=ROWS, seed=1))
        target.write_text(FILE)
    except OSError as error:
        raise ConfigError(f"--init: cannot write to {str(folder)!r} ({error.strerror or error})") from None
    return target
