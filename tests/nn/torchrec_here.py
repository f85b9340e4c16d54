"""TorchRec for tests: from ``SHOAL_TORCHREC``, from ``build/torchrec`` (``scripts/torchrec_env.sh``), or installed."""

import os
import sys
import warnings
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("SHOAL_TORCHREC") or Path(__file__).parents[2] / "build" / "torchrec")


def import_torchrec():
    """The package; skips the test module where there is none, or torch is one that it does not load with."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # at the end, so that it replaces no other package
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchrec
        except (ImportError, OSError, RuntimeError) as error:
            text = f"no TorchRec here ({error!s:.80}); scripts/torchrec_env.sh build/torchrec gets it"
            pytest.skip(text, allow_module_level=True)
    return torchrec
