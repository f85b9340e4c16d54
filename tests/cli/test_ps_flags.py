"""Flags of `shoal ps`."""

import pytest

from shoal.cli import ps


@pytest.mark.parametrize("flag", ["--allow-insecure", "--insecure"])
def test_ps_listens_without_keys_where_it_is_told_to(flag, monkeypatch):
    given = []
    monkeypatch.setattr(ps, "serve", lambda options: given.append(options) or 0)
    assert ps.main(["--host", "0.0.0.0", flag]) == 0
    assert ps.main(["--host", "0.0.0.0"]) == 0
    assert [options.allow_insecure for options in given] == [True, False]
