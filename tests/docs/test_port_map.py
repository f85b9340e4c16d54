"""Every entry of the map from the original systems' names can be imported, or is a test file that exists."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "port_map.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
TARGETS = sorted({name for _, here in ROWS for name in re.findall(r"`([\w./]+)`", here) if "." in name})


def resolve(name):
    """The module, class, function, method, property or field that a dotted name stands for."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if part in getattr(thing, "__dataclass_fields__", ()):
                return thing.__dataclass_fields__[part]
            thing = getattr(thing, part)
        return thing
    raise AssertionError(f"no module begins {name!r}")


@pytest.mark.parametrize("name", TARGETS)
def test_it_is_where_the_map_says(name):
    if "/" in name:
        assert (ROOT / name).is_file()
    else:
        resolve(name)


def test_every_row_leads_somewhere():
    assert len(ROWS) > 200
    for original, here in ROWS:
        if original not in ("original", "---"):
            assert re.search(r"`(shoal|tests|benchmarks)[./]|`shoal", here), original


def test_a_name_that_is_not_there_would_be_noticed():
    with pytest.raises(AttributeError):
        resolve("shoal.serving.NoSuchThing")
