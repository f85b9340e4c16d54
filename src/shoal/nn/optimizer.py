"""`SparseOptimizer`: a `torch.optim.Optimizer` whose ``step`` updates the rows of tables."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, UnsupportedError
from shoal.nn.amp import RowParameter
from shoal.nn.keeper import TableKeeper, keeper_of
from shoal.nn.module import TableModule
from shoal.nn.protocol import EmbeddingTable
from shoal.nn.update.gradients import clear_pending, is_empty, put_back, take_pending
from shoal.nn.update.units import Unit, by_clock, update_all
from shoal.table.config.learning_rate import check_rate
from shoal.table.protocol import Step


class SparseOptimizer(torch.optim.Optimizer):
    """Holds the gradients of table rows until `step`, which runs each table's own optimizer on them.

    >>> import shoal, torch
    >>> from shoal.nn import HashEmbeddingBag, SparseOptimizer
    >>> table = shoal.HashTable(dim=1, optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
    >>> bag = HashEmbeddingBag(table)
    >>> optimizer = SparseOptimizer(bag)
    >>> for batch in ([[7]], [[7, 8]]):  # two batches, one step
    ...     bag(batch).sum().backward()
    >>> optimizer.step()
    >>> table.lookup(torch.tensor([7, 8])).tolist()
    [[-2.0], [-1.0]]

    Once it exists, backward no longer changes the rows of its tables. The gradients of an id are summed over all
    backward passes since the last step, over all modules on its table and all threads, and make one step.
    `zero_grad` drops pending gradients. Tables of modules made with ``fused=True`` update in backward and are left out.

    There is one parameter group per table: ``{"table": name, "lr": …}``. ``lr`` starts as the table's own rate; setting
    it, by hand or with any ``torch.optim.lr_scheduler``, multiplies the table's rates (of all segments, including
    schedules) by ``lr`` divided by that initial rate.

    With a `torch.amp.GradScaler` it works like torch's own optimizers: ``scaler.step(optimizer)`` divides the gradients
    by the scale, and skips the step if one of them is NaN or infinite. Call ``zero_grad`` for each batch: gradients of
    a skipped step would otherwise stay pending.

    Args:
        modules: a model, modules or tables that contain the tables to step.
        lr: the rate of every table, instead of its own.
    """

    def __init__(
        self,
        modules: nn.Module | EmbeddingTable | Iterable[nn.Module | EmbeddingTable],
        *,
        lr: float | None = None,
    ) -> None:
        if lr is not None:
            check_rate(lr, "SparseOptimizer: lr")
        keepers = [keeper for keeper in _keepers(modules) if not keeper.fused]
        if not keepers:
            raise ConfigError("SparseOptimizer: modules must have a table that is not fused=True, got none")
        groups = []
        for keeper in keepers:
            base = keeper.base_lr()
            group = {"params": [RowParameter.of(keeper.pending)], "lr": base if lr is None else lr, "base_lr": base}
            groups.append(group | {"table": keeper.table.name})
        self.global_step = 0
        """The number of the next `step`."""
        super().__init__(groups, {"lr": 0.0})
        self._keepers = keepers
        # Gradients may wait for a table that no module holds any longer.
        self._tables = [keeper.table for keeper in keepers]
        for keeper in keepers:
            keeper.hold()

    @torch.no_grad()
    def step(  # pyrefly: ignore[bad-override]
        self,
        global_step: int | Callable[[], Any] | None = None,
        *,
        req_time: int | None = None,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Apply all pending gradients and clear them.

        Args:
            global_step: for learning-rate schedules; by default the number of steps so far. A closure is accepted in
                its place, as by torch's own optimizers.
            req_time: the rows' timestamp in seconds; by default now.
            closure: computes the loss and its gradients first; its result is returned.

        Raises:
            ConfigError: a gradient is NaN or infinite and its table's policy is to raise. The tables of its group are
                unchanged and their gradients stay pending: clip them or call `zero_grad`. Groups before it have been
                stepped.
        """
        loss = None
        if callable(global_step):
            global_step, closure = None, global_step
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = self.global_step if global_step is None else int(global_step)
        groups = dict(zip(self._keepers, self.param_groups, strict=True))
        units = take_pending(self._keepers)
        if req_time is None:
            units = [one for unit in units for one in by_clock(unit, unit.touched())]
        batches = _in_step(units)
        for done, batch in enumerate(batches):
            try:
                updates = []
                for unit in batch:
                    touched = unit.touched()
                    scales = [_factor(groups[keeper]) if keeper in touched else 1.0 for keeper in unit.keepers]
                    if is_empty(unit):
                        continue
                    _check_not_captured(unit)
                    scaled = scales if any(s != 1.0 for s in scales) else None
                    updates.append((unit, Step(number, touched[0].time(req_time), scaled)))
                update_all(updates)
            except BaseException:
                for left in itertools.chain(*batches[done:]):
                    put_back(left)
                raise
        self.global_step = number + 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the pending gradients."""
        clear_pending(self._keepers)

    def gradients(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the pending gradients by table: distinct ids and their summed gradients, which `step` will use.

        Gradients can be changed in place. If tables share a name, the second is ``name#2``, and so on.
        """
        found, seen = {}, Counter()
        for keeper in self._keepers:
            name, sums = keeper.table.name, keeper.pending.sums()
            seen[name] += 1
            if sums[0].numel():
                found[name if seen[name] == 1 else f"{name}#{seen[name]}"] = sums
        return found

    def clip_grad_norm(self, max_norm: float, **options: Any) -> Tensor:
        """Call `shoal.nn.clip_grad_norm` for the pending gradients; ``parameters=`` adds dense parameters."""
        from shoal.nn.clip import clip_grad_norm

        return clip_grad_norm(self, max_norm, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_keepers"):
            raise ConfigError("SparseOptimizer: tables cannot be added later; make another optimizer for them")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return learning rates and the step; the optimizer state of rows is in the modules' ``state_dict``."""
        return super().state_dict() | {"global_step": self.global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        step = state_dict.pop("global_step", 0)
        super().load_state_dict(state_dict)
        self.global_step = int(step)


def _in_step(units: list[Unit]) -> list[list[Unit]]:
    """Divide updates into batches that run together: groups over the same ranks share their exchange."""
    batches: dict[Any, list[Unit]] = {}
    for number, unit in enumerate(units):
        shares = unit.group.traits.shares
        batches.setdefault(number if shares is None else (shares, unit.group.traits.device), []).append(unit)
    return list(batches.values())


def _check_not_captured(unit: Unit) -> None:
    if unit.group.traits.capturable and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"table {unit.keepers[0].name!r}: SparseOptimizer.step cannot be captured in a CUDA graph, because replays "
            "would repeat its step, time and learning rate; update the rows in backward (fused=True) instead"
        )


def _factor(group: dict[str, Any]) -> float:
    lr, base = float(group["lr"]), float(group["base_lr"])
    if lr == base:
        return 1.0
    if base == 0:
        raise ConfigError(
            f"SparseOptimizer: table {group['table']!r} must have a learning rate other than 0 to be scaled to "
            f"lr={lr:g}; set the rate of the table's optimizer"
        )
    return lr / base


def _keepers(modules: Any) -> list[TableKeeper]:
    def each(thing: Any) -> Iterator[TableKeeper]:
        if isinstance(thing, nn.Module):
            for module in thing.modules():
                if isinstance(module, TableModule):
                    yield from module.keepers()
        elif isinstance(thing, EmbeddingTable):
            yield keeper_of(thing)
        elif isinstance(thing, Iterable) and not isinstance(thing, str | bytes | Tensor):
            for one in thing:
                yield from each(one)
        else:
            raise ConfigError(f"SparseOptimizer: modules must be modules or tables, got {type(thing).__name__}")

    return list(dict.fromkeys(each(modules)))
