"""Writes a window's artifact: owners send their payloads in pieces, and one rank writes them as they arrive."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.gather.artifact.layout import ALIGN, block_table, header_bytes
from shoal.gather.errors import GatherError, RankFailure
from shoal.gather.payload.spec import GradientSpec
from shoal.gather.payload.validate import raw_bytes
from shoal.gather.protocol.control import Control
from shoal.gather.protocol.holding import Holding, hold
from shoal.gather.protocol.merge import SKIP, Source

log = logging.getLogger("shoal.gather")

_STATUS_BYTES = 16


def write_artifact(
    source: Source,
    path: str | os.PathLike[str],
    *,
    spec: GradientSpec,
    group: Any = None,
    budget_bytes: int = 1 << 30,
    artifact_rank: int = 0,
    control_timeout_s: float = 240.0,
) -> str | None:
    """Write the window's artifact on ``artifact_rank``; every rank of the group must call it.

    Returns the file's SHA-256 on the rank that writes, None on the others and when the decision is SKIP. The file
    appears atomically; an existing file is kept if its bytes are equal, and is an error if they differ. Memory: pieces
    within ``budget_bytes``, regardless of the number of peers.
    """
    if budget_bytes < 1:
        raise ConfigError(f"write_artifact: budget_bytes must be at least 1, got {budget_bytes}")
    control = Control(group, timeout_s=control_timeout_s)
    if not 0 <= artifact_rank < control.world:
        raise ConfigError(f"write_artifact: artifact_rank must be in 0..{control.world - 1}, got {artifact_rank}")
    holding = hold(source, spec, control)
    if holding.decision == SKIP:
        return None
    holding.require_complete("write_artifact")
    writer = _Writer(holding, control, artifact_rank, budget_bytes)
    return writer.run(Path(path))


class _Writer:
    """The blocks in file order; owners send, the artifact rank writes, one piece ahead."""

    def __init__(self, holding: Holding, control: Control, rank: int, budget: int) -> None:
        self.holding, self.control, self.rank = holding, control, rank
        self.table = block_table(holding.spec, [holding.codes[uid] for uid in holding.manifest.uids])
        self.piece = max(ALIGN, budget // 4)

    def run(self, path: Path) -> str | None:
        control, sha, error = self.control, None, None
        try:
            if control.rank == self.rank:
                sha = self._write(path)
            else:
                self._send()
        except RankFailure:
            raise
        except Exception as caught:  # all ranks finish the sequence before any raises
            error = caught
        if not control.minimum(int(error is None)):
            why = error or "another rank failed"
            raise GatherError(f"window {self.holding.manifest.window}: the artifact was not written: {why}") from error
        return sha

    def _blocks(self) -> Iterator[tuple[int, int, list[Any]]]:
        entries = iter(self.table)
        for index in range(len(self.holding.spec.params)):
            for uid in self.holding.manifest.uids:
                yield index, uid, next(entries)

    def _pieces(self) -> Iterator[tuple[int, int, list[Any], int, int]]:
        """(parameter, UID, block, first byte, last byte + 1) of everything, in file order."""
        for index, uid, block in self._blocks():
            size = sum(block[1:4])
            for start in range(0, size, self.piece):
                yield index, uid, block, start, min(start + self.piece, size)

    def _from_here(self, uid: int) -> bool:
        return self.holding.owners[uid] == self.rank or self.holding.everywhere

    def _read(self, index: int, uid: int, start: int, stop: int) -> Tensor:
        """Read bytes ``start..stop`` of a block: idxs, then vals, then the quant block."""
        ref = self.holding.refs[uid]
        ref.check_readable()
        idxs, vals = ref.slice(index, 0, ref.spec.params[index].chunks)
        quant = ref.quant_block(index)
        parts = [idxs, vals, torch.frombuffer(bytearray(quant), dtype=torch.uint8) if quant else idxs[:0]]
        out, at = [], 0
        for part in parts:
            begin, end = max(start - at, 0), min(stop - at, len(part))
            if begin < end:
                out.append(part[begin:end])
            at += len(part)
        return torch.cat(out)

    def _send(self) -> None:
        """Send one piece at a time; an unreadable piece is sent with a bad status, so that its receiver continues."""
        for index, uid, _, start, stop in self._pieces():
            if self.holding.owners[uid] != self.control.rank or self._from_here(uid):
                continue
            buffer = torch.zeros(_STATUS_BYTES + stop - start, dtype=torch.uint8, device="cpu")
            try:
                buffer[_STATUS_BYTES:] = self._read(index, uid, start, stop)
                buffer[0] = 1
            except Exception:
                log.exception("peer %d's payload cannot be read for the artifact", uid)
            self.control.wait([self.control.start_send(buffer, self.rank)])

    def _incoming(self) -> Iterator[tuple[list[Any], int, Tensor]]:
        """Yield all pieces in file order; the next one is received while one is written.

        After a piece that cannot be read, it receives the others, so that their owners can finish, and then raises.
        """
        ahead: list[tuple[Any, Tensor]] = []
        remote = (piece for piece in self._pieces() if not self._from_here(piece[1]))

        def ask() -> None:
            if (item := next(remote, None)) is not None:
                buffer = torch.empty(_STATUS_BYTES + item[4] - item[3], dtype=torch.uint8, device="cpu")
                ahead.append((self.control.start_recv(buffer, self.holding.owners[item[1]]), buffer))

        ask()
        failure: Exception | None = None
        for index, uid, entry, start, stop in self._pieces():
            try:
                if self._from_here(uid):
                    data = self._read(index, uid, start, stop)
                else:
                    work, buffer = ahead.pop(0)
                    self.control.wait([work])
                    ask()
                    data = buffer[_STATUS_BYTES:]
                    if buffer[0] != 1:
                        raise OSError(f"rank {self.holding.owners[uid]} could not read peer {uid}'s payload")
            except RankFailure:
                raise
            except Exception as error:
                failure = failure or error
                continue
            if failure is None:
                yield entry, start, data
        if failure is not None:
            raise failure

    def _write(self, path: Path) -> str:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        sha, blake = hashlib.sha256(), hashlib.blake2b(digest_size=32)
        incoming = self._incoming()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:

                def put(data: Any) -> None:
                    sha.update(data)
                    blake.update(data)
                    file.write(data)

                put(header_bytes(self.holding.manifest, self.holding.spec, self.table))
                at = 0
                for entry, start, data in incoming:
                    if start == 0 and at < entry[0]:
                        put(b"\0" * (entry[0] - at))
                        at = entry[0]
                    put(raw_bytes(data))
                    at += len(data)
                put(b"\0" * (-at % ALIGN))
                trailer = blake.digest()
                sha.update(trailer)
                file.write(trailer)
            if path.exists():
                if _sha256(path) != sha.hexdigest():
                    raise ConfigError(f"{path.name} exists with different content; an artifact must not be replaced")
            else:
                temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                for _ in incoming:  # receive the remaining pieces, so that their owners can finish
                    pass
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return sha.hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
