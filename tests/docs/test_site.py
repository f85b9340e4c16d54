"""The site builds, and a warning of Sphinx is an error, as in `make docs`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("furo", reason='the site needs pip install "shoal[docs]"')
    pytest.importorskip("myst_parser", reason='the site needs pip install "shoal[docs]"')
    command = [sys.executable, "-m", "sphinx", "-b", "dummy", "-W", "--keep-going", "-q", "-d", str(tmp_path / "trees")]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path / "site")], capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr[-4000:]
