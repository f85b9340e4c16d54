"""The definition of a join in plain Python: an offline join of all messages in order of arrival.

The native joiner gives the same samples in the same order and the same counts; tests compare the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from shoal import _core

NEVER = -(1 << 62)


@dataclass(frozen=True, slots=True)
class Impression:
    """Something that was shown to a user. Times in this module are integers."""

    key: str
    time: int
    payload: Any = None


@dataclass(frozen=True, slots=True)
class Action:
    """A user's action on an impression."""

    key: str
    time: int
    kind: str = ""
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Advance:
    """A declaration that a side has nothing before ``time`` left: it ended, or it is quiet."""

    side: Literal["impressions", "actions"]
    time: int


class Joined(NamedTuple):
    """One sample: an impression and the values of its labels, in the order of ``labels``."""

    impression: Impression
    labels: tuple[float, ...]


Label = tuple[str, frozenset[str]]
"""A rule (any, count, sum, max, first, last), and the kinds of actions that count for it; empty for all kinds."""


def join_offline(
    events: Iterable[Impression | Action | Advance],
    *,
    window: int,
    before: int = 0,
    lateness: tuple[int, int] = (0, 0),
    labels: Sequence[Label] = (("any", frozenset()),),
    close_on_action: bool = False,
    max_actions: int = 1000,
    keep_negatives: float = 1.0,
    seed: int = 0,
) -> tuple[list[Joined], Counter[str]]:
    """Join events; return the samples and the counts.

    An action belongs to an impression with the same key if it is at most ``before`` earlier and ``window`` later. A
    side's watermark is the latest time that it has shown, minus its lateness: nothing earlier is expected from it. An
    impression becomes a sample when both watermarks have reached the end of its window; samples come in the order of
    these ends. An event that arrives after its own side's watermark has passed the end of a window is late for that
    window. Lateness and the contents of samples therefore do not depend on how the two sides interleave.
    """
    sides = ("impressions", "actions")
    watermark = dict.fromkeys(sides, NEVER)
    closed = NEVER
    count: Counter[str] = Counter()
    samples: list[Joined] = []
    open_: list[tuple[int, int, Impression]] = []  # (end of its window, number, impression)
    emitted: set[int] = set()  # numbers of impressions that an action has already made into samples
    waiting: list[tuple[int, int, Action, int]] = []  # (when it expires, number, action, watermark at arrival)

    def counted_for(action: Action) -> list[bool]:
        return [not kinds or action.kind in kinds for _, kinds in labels]

    def eligible(end: int, impression: Impression) -> list[tuple[int, int, Action, int]]:
        """The waiting actions that belong to an impression, in order of arrival."""
        return sorted(
            (
                one
                for one in waiting
                if one[2].key == impression.key
                and impression.time - before <= one[2].time <= end
                and one[3] < end  # the window was open when the action arrived
            ),
            key=lambda one: one[1],
        )

    def emit(impression: Impression, actions: Sequence[Action]) -> None:
        positive = any(counted_for(one)[0] for one in actions)
        count["joined_actions"] += len(actions)
        if not positive and not _core.keeps_negative(impression.key.encode(), seed, keep_negatives):
            count["negatives_dropped"] += 1
            return
        count["positives" if positive else "negatives"] += 1
        samples.append(Joined(impression, tuple(_value(i, actions) for i in range(len(labels)))))

    def _value(label: int, actions: Sequence[Action]) -> float:
        values = [one.value for one in actions if counted_for(one)[label]]
        if not values:
            return 0.0
        return {
            "any": lambda: 1.0, "count": lambda: float(len(values)), "sum": lambda: _sum(values),
            "max": lambda: max(values), "first": lambda: values[0], "last": lambda: values[-1],
        }[labels[label][0]]()  # fmt: skip

    def close() -> None:
        """Remove impressions and actions in the order of their ends; at equal ends, impressions first."""
        for end, number, impression in sorted(one for one in open_ if one[0] <= closed):
            open_.remove((end, number, impression))
            if number in emitted:
                continue
            found = eligible(end, impression)
            for one in found:
                waiting.remove(one)
            unique: dict[tuple, tuple[int, Action]] = {}
            for _, order, action, _ in found:  # a duplicate action counts once
                unique.setdefault((action.time, action.kind, action.value), (order, action))
            count["duplicate_actions"] += len(found) - len(unique)
            emit(impression, [action for _, action in sorted(unique.values(), key=lambda o: (o[1].time, o[0]))])
        for one in [one for one in waiting if one[0] <= closed]:
            waiting.remove(one)
            count["late_actions" if one[2].time <= one[3] else "unmatched_actions"] += 1

    def impression(one: Impression, number: int) -> None:
        count["impressions"] += 1
        end = one.time + window
        if end <= watermark["impressions"]:
            count["late_impressions"] += 1
            return
        if any(other.key == one.key and until > watermark["impressions"] for until, _, other in open_):
            count["duplicate_impressions"] += 1  # the first one counts
        else:
            open_.append((end, number, one))
            found = eligible(end, one) if close_on_action else []
            first = next((each for each in found if counted_for(each[2])[0]), None)
            if first is not None:
                emit_now(one, number, first[2], found, after=len(found) - 1)
        watermark["impressions"] = max(watermark["impressions"], one.time - lateness[0])

    def emit_now(one: Impression, number: int, action: Action, consumed: list, after: int) -> None:
        emit(one, [action])
        emitted.add(number)
        count["actions_after_close"] += after
        for each in consumed:
            waiting.remove(each)

    def action(one: Action, number: int) -> None:
        count["actions"] += 1
        own, gone = watermark["actions"], one.time + before + window
        if not any(counted_for(one)):
            count["ignored_actions"] += 1
        elif gone <= own:
            count["late_actions"] += 1
            return
        else:
            mine = [
                each for each in open_
                if close_on_action and each[2].key == one.key and each[0] > own
                and each[2].time - before <= one.time <= each[0]
            ]  # fmt: skip
            end, of, shown = min(mine, key=lambda each: each[:2]) if mine else (0, -1, None)
            if shown is not None and of in emitted:
                count["actions_after_close"] += 1
            elif shown is not None and counted_for(one)[0]:
                found = eligible(end, shown)
                emit_now(shown, of, one, found, after=len(found))
            elif sum(each[2].key == one.key for each in waiting) >= max_actions:
                count["excess_actions"] += 1
            else:
                waiting.append((gone, number, one, own))
        if gone > own:
            watermark["actions"] = max(own, one.time - lateness[1])

    for number, event in enumerate(events):
        if isinstance(event, Advance):
            watermark[event.side] = max(watermark[event.side], event.time)
        elif isinstance(event, Impression):
            impression(event, number)
        else:
            action(event, number)
        closed = max(closed, min(watermark.values()))
        close()
    return samples, +count


def _sum(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:  # in order, like the native joiner; math.fsum is exact and would differ
        total += value
    return total
