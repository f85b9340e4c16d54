"""Flags of `shoal ps`."""

import errno

import pytest

from shoal.cli.servers import ps, serving


@pytest.mark.parametrize("flag", ["--allow-insecure", "--insecure"])
def test_ps_listens_without_keys_where_it_is_told_to(flag, monkeypatch):
    given = []
    monkeypatch.setattr(ps, "serve", lambda options: given.append(options) or 0)
    assert ps.main(["--host", "0.0.0.0", flag]) == 0
    assert ps.main(["--host", "0.0.0.0"]) == 0
    assert [options.allow_insecure for options in given] == [True, False]


def test_a_server_that_has_to_start_again_waits_for_room_on_its_disk(monkeypatch, caplog):
    full = OSError(errno.ENOSPC, "No space left on device")
    answers = [(None, (7100, 7101)), full, full, (0, (7100, 7101))]

    def serve_once(options, stop, ports):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(serving, "_serve_once", serve_once)
    monkeypatch.setattr("shoal.sharded.ps.server.engine.ROOM_EVERY_S", 0.01)
    assert ps.main([]) == 0
    assert caplog.text.count("is waiting for free disk space") == 2
    answers[:] = [full]
    with pytest.raises(OSError, match="No space"):  # at the first start, the error goes to the caller
        ps.main([])
