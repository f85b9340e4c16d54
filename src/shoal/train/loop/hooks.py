"""Find a run's hooks by name, check them, and call them around steps and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from typing import Any

from torch import nn

from shoal.comm.horovod.hooks import RunContext, SessionRunHook
from shoal.errors import ConfigError
from shoal.models.build import find_object
from shoal.train.loop.measure.trackers import TRACKERS, Tracker

_METHODS = ("begin", "after_create_session", "before_run", "after_run", "end")
_SAVES = ("before_save", "after_save")
_REPORTS = ("on_progress", "on_evaluated")


class SaveTimer:
    """Lets hooks decide when checkpoints are written.

    `enable` and `disable` apply to periodic ones; `reset` requests one after this step.
    """

    def __init__(self) -> None:
        self.enabled = True
        """Whether periodic checkpoints are written; the last checkpoint of a run always is."""
        self.asked = False
        """Whether a hook requested a checkpoint after this step."""

    def enable(self) -> None:
        self.enabled = True

    def disable(self) -> None:
        self.enabled = False

    def reset(self) -> None:
        self.asked = True


class TrainContext(RunContext):
    """The context that hooks get: ``model``, ``global_step``, ``tables`` by name, ``req_time``, ``request_stop()``.

    ``tables`` are in this process or on servers. ``req_time`` is the newest time in the last batch.
    """

    def __init__(self, model: nn.Module, tables: Mapping[str, Any]) -> None:
        super().__init__(model)
        self.tables = dict(tables)
        self.req_time: int | None = None


class Hooks:
    """Calls all hooks, always in the given order."""

    def __init__(self, hooks: Iterable[Any], context: TrainContext) -> None:
        self._hooks = [_checked(hook) for hook in hooks]
        self.context = context

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def begin(self) -> None:
        """Called before anything is restored."""
        for hook in self._hooks:
            hook.begin()

    def after_create_session(self, step: int) -> None:
        """Called when everything is restored, before the first step."""
        self.context.global_step = step
        for hook in self._hooks:
            hook.after_create_session(self.context)

    def before_run(self) -> None:
        for hook in self._hooks:
            hook.before_run(self.context)

    def after_run(self, step: int, values: dict[str, Any]) -> None:
        self.context.global_step, self.context.req_time = step, values.get("req_time")
        for hook in self._hooks:
            hook.after_run(self.context, values)

    def before_save(self, step: int) -> None:
        for hook in self._hooks:
            hook.before_save(self.context, step)

    def after_save(self, step: int) -> None:
        for hook in self._hooks:
            hook.after_save(self.context, step)

    def on_progress(self, step: int, values: Mapping[str, Any]) -> None:
        """Pass the numbers of a report to hooks that have ``on_progress(ctx, values)``."""
        self._report("on_progress", step, values)

    def on_evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        """Pass the numbers of an evaluation to hooks that have ``on_evaluated(ctx, values)``."""
        self._report("on_evaluated", step, values)

    def _report(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        self.context.global_step = step
        for hook in self._hooks:
            method = getattr(hook, name, None)
            if method is not None:
                method(self.context, values)

    def end(self) -> None:
        for hook in self._hooks:
            hook.end(self.context)


class _Fitted(SessionRunHook):
    """Adapts an object with some of a hook's methods, or a checkpoint listener, to `SessionRunHook`.

    A method that takes fewer arguments gets fewer (a table listener's `before_save` only the step), and
    ``before_restore`` is called as ``begin``.
    """

    def __init__(self, hook: Any) -> None:
        for name in ("before_restore", *_METHODS, *_SAVES, *_REPORTS):
            method = getattr(hook, name, None)
            if callable(method):
                setattr(self, "begin" if name == "before_restore" else name, _fitted(method, name in _SAVES))


def _fitted(method: Callable[..., Any], last: bool) -> Callable[..., Any]:
    kinds = [parameter.kind for parameter in signature(method).parameters.values()]
    if Parameter.VAR_POSITIONAL in kinds:
        return method
    takes = sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)

    def call(*given: Any) -> None:
        if method.__name__ == "end":  # a listener's `end` also takes the step
            given = (*given, given[0].global_step)
        method(*(given[len(given) - takes :] if last else given[:takes]))

    return call


def _checked(hook: Any) -> SessionRunHook:
    if isinstance(hook, SessionRunHook):
        return hook
    if isinstance(hook, type):
        raise ConfigError(f"hooks: hooks must be objects, got the class {hook.__name__}; pass {hook.__name__}()")
    present = {name for name in ("before_restore", *_METHODS, *_SAVES) if callable(getattr(hook, name, None))}
    if present >= set(_METHODS) or present & {"before_restore", *_SAVES}:
        return _Fitted(hook)
    missing = ", ".join(name for name in _METHODS if name not in present)
    raise ConfigError(f"hooks: {hook!r} is not a hook, it has no {missing}; derive it from shoal.train.SessionRunHook")


def make_hooks(given: Iterable[Any], run: Any) -> list[Any]:
    """The hooks of a run: objects, functions that take the `Trainer` and return one, and names of functions or classes.

    Raises:
        ConfigError: a name does not exist, or is a class that needs arguments.
    """
    return [_made(one, run) for one in given]


def _made(given: Any, run: Any) -> Any:
    if isinstance(given, str) and given in TRACKERS:
        return TRACKERS[given](run)
    found = find_object(given, "[train] hooks:", "package.module:Hook") if isinstance(given, str) else given
    if isinstance(given, str) and isinstance(found, type) and issubclass(found, Tracker):
        return found(run)
    if isinstance(given, str) and isinstance(found, type):
        try:
            return found()
        except TypeError as error:
            raise ConfigError(
                f"[train] hooks: {given!r} must not need arguments ({error}); name a function that takes the Trainer "
                "and returns the hook"
            ) from None
    makes = callable(found) and not isinstance(found, type | SessionRunHook)
    return found(run) if makes else found
