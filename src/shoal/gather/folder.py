"""A temporary folder that goes, quietly, with the last object that holds it."""

import shutil
import tempfile
import weakref
from pathlib import Path


class Folder:
    """``path`` exists until ``remove`` is called or nobody holds this object any more."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self.remove = weakref.finalize(self, shutil.rmtree, str(self.path), ignore_errors=True)
