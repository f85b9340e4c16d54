"""One call to a model, retried within one deadline: each replica in turn, with pauses between rounds."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import grpc

from shoal.metrics import emit_counter
from shoal.observe import tracing
from shoal.serving.client.channels import Channels
from shoal.serving.client.replicas import Replica, ReplicaSet
from shoal.serving.status import Code, StatusError, from_rpc_error

FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 0.02, 0.5

AGAIN = frozenset({Code.UNAVAILABLE, Code.ABORTED, Code.CANCELLED, Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED})
"""Status codes of a server that failed or could not be reached. Another server, or the same one later, may succeed."""
LOST = ("stream removed", "rst_stream", "goaway", "socket closed", "connection reset", "broken pipe")
"""Words in gRPC's message when a connection broke during a call and the code is UNKNOWN or INTERNAL."""


def may_retry(error: StatusError) -> bool:
    """Whether the same request may succeed on another server or later. An invalid request fails everywhere."""
    if error.code in (Code.UNKNOWN, Code.INTERNAL):
        return any(word in error.message.lower() for word in LOST)
    return error.code in AGAIN and not is_too_large(error)


def is_too_large(error: StatusError) -> bool:
    """Whether the message, or its decoded content, was larger than the server accepts."""
    words = {Code.RESOURCE_EXHAUSTED: "larger than max", Code.INVALID_ARGUMENT: "bytes when they are decoded"}
    return error.code in words and words[Code(error.code)] in error.message


class Caller:
    """Calls methods of a model's replicas. Used on one event loop.

    Args:
        what: the model's name in error messages.
        retries: further attempts after the first; None = as many as the deadline allows.
        why_none: returns why there is no replica, for the error message.
    """

    def __init__(
        self, what: str, channels: Channels, replicas: ReplicaSet, retries: int | None, why_none: Callable[[], str]
    ) -> None:
        self.what, self.replicas, self.retries = what, replicas, retries
        self._channels, self._why_none = channels, why_none
        self._joined = asyncio.Event()

    def replicas_changed(self) -> None:
        """Wake the calls that wait for a replica."""
        self._joined.set()
        self._joined = asyncio.Event()

    async def call(self, method: str, payload: bytes, end: float) -> tuple[bytes, str]:
        """Return (answer, address that it came from); ``end`` is the deadline on the ``time.monotonic`` clock.

        Raises:
            StatusError: the request is invalid (raised at once), or the last of ``retries`` attempts failed.
            TimeoutError: no replica answered in time.
        """
        tried: set[str] = set()
        missing: dict[str, StatusError] = {}
        pause, attempts = FIRST_PAUSE_SECS, 0
        while True:
            now = time.monotonic()
            if now >= end:
                raise TimeoutError
            replica = self.replicas.pick(now, tried | missing.keys())
            if replica is None:
                if missing and missing.keys() >= set(self.replicas.addresses):
                    raise next(iter(missing.values()))
                if len(self.replicas):
                    tried.clear()
                    await asyncio.sleep(min(pause * random.uniform(0.5, 1), max(0.0, end - now)))
                    pause = min(2 * pause, LONGEST_PAUSE_SECS)
                else:
                    await asyncio.wait_for(self._joined.wait(), end - now)
                continue
            tried.add(replica.address)
            others = any(address not in tried and address not in missing for address in self.replicas.addresses)
            try:
                # A replica that hangs must leave time for the others.
                return await self._attempt(
                    replica, method, payload, (end - now) / (2 if others else 1)
                ), replica.address
            except StatusError as failure:
                message = failure.message
                error = StatusError(failure.code, f"{self.what} at {replica.address}: {message}")
            if error.code == Code.NOT_FOUND:
                missing[replica.address] = error
                continue
            if not may_retry(error):
                raise error
            replica.failed(time.monotonic(), message)
            attempts += 1
            if self.retries is not None and attempts > self.retries:
                raise error
            emit_counter("shoal_client_retries", 1, f"code={error.code}")

    async def _attempt(self, replica: Replica, method: str, payload: bytes, timeout: float) -> bytes:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        try:
            call = self._channels.call(replica.address, method).future(
                payload, timeout=timeout, metadata=tracing.current() or None
            )
        except ValueError as error:  # the channel was closed because its address was removed
            raise StatusError(Code.UNAVAILABLE, str(error)) from None

        def wake(_: Any) -> None:
            loop.call_soon_threadsafe(lambda: done.done() or done.set_result(None))

        replica.in_flight += 1
        try:
            call.add_done_callback(wake)
            await done
            answer = call.result()
            replica.answered()
            return answer
        except grpc.FutureCancelledError:
            raise StatusError(Code.CANCELLED, "the channel was closed") from None
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            replica.in_flight -= 1
            call.cancel()

    def too_late(self, seconds: float) -> StatusError:
        """The error for a request that missed its deadline, with the state of each replica."""
        if not len(self.replicas):
            return StatusError(Code.UNAVAILABLE, f"{self.what}: {self._why_none()}")
        failing = [each for each in self.replicas if each.failures]
        states = [f"{each.address}: {each.last_error}" for each in failing]
        states += [f"{each.address} is up" for each in self.replicas if not each.failures]
        code = Code.UNAVAILABLE if len(failing) == len(self.replicas) else Code.DEADLINE_EXCEEDED
        return StatusError(code, f"{self.what}: no answer within {seconds:g} s ({'; '.join(states)})")
