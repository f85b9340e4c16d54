"""End the input in the same step on all ranks, although their data ends at different times."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shoal.comm.ranks import control
from shoal.table.export_mode import is_exporting

_END = object()


class EofAwareTask:
    """Wraps ``task`` so that its input ends on every rank as soon as it ends on one.

    The task must have ``create_input_fn(mode)``, which returns a function that returns an iterable of batches, and
    ``create_model_fn()``; all other attributes are the task's. Batches are unchanged; one is read ahead. With one rank,
    and while exporting, the wrapper does nothing.
    """

    def __init__(self, task: Any, use_dataservice: bool = False) -> None:
        self._task = task
        self.use_dataservice = use_dataservice

    def __getattr__(self, name: str) -> Any:
        if name == "_task":  # copy and pickle ask for it before __init__ has run
            raise AttributeError(name)
        return getattr(self._task, name)

    def create_input_fn(self, mode: Any) -> Callable[..., Iterable[Any]]:
        input_fn = self._task.create_input_fn(mode)
        export = "export" in str(getattr(mode, "name", mode)).lower()

        def wrapped(*args: Any, **kwargs: Any) -> Iterable[Any]:
            batches = input_fn(*args, **kwargs)
            active = control.world_size() > 1 and not export and not is_exporting()
            return _until_any_ends(batches) if active else batches

        return wrapped

    def create_model_fn(self) -> Callable[..., Any]:
        return self._task.create_model_fn()


def _until_any_ends(batches: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(batches)
    batch = next(iterator, _END)
    if _any(batch is _END):
        return
    while True:
        following = next(iterator, _END)
        last = _any(following is _END)
        yield batch
        if last:
            return
        batch = following


def _any(flag: bool) -> bool:
    return any(flags[0] for flags in control.gather_ints([int(flag)]))
