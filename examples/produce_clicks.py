"""Produces impressions and, some seconds later, clicks, as a site would: two streams of JSON messages.

    python produce_clicks.py --rate 500
    python produce_clicks.py --impressions dir:impressions --actions dir:actions      # without a broker

Users like some tags more than others, and click less on expensive items, so that there is something to learn.
"""

import argparse
import heapq
import json
import random
import time

from shoal.data.live import open_writer

TAGS = ["news", "sports", "music", "local", "film"]


def impression(made: random.Random, number: int, now: float) -> dict:
    tags = made.sample(TAGS, made.randint(1, 3))
    age = made.choice([None, *range(16, 80)])
    return {
        "request": f"r{number}-{now:.3f}", "time": round(now, 6), "user": f"u{made.randrange(20_000)}", "tags": tags,
        "age": age, "price": round(made.expovariate(0.1), 2),
    }  # fmt: skip


def clicks(made: random.Random, shown: dict) -> bool:
    likes = "music" if int(shown["user"][1:]) % 2 else "sports"
    return made.random() < (0.6 if likes in shown["tags"] else 0.1) / (1 + shown["price"] / 50)


class Numbered:
    """Writes numbered messages, each of them once; waits while the broker is unreachable."""

    def __init__(self, address: str) -> None:
        self.writer = open_writer(address)
        self.partition = "0" if address.startswith("kafka:") else None
        self.count = self.writer.written(self.partition)

    def append(self, messages: list[dict]) -> None:
        if messages:
            records = [json.dumps(message).encode() for message in messages]
            self.writer.append(records, partition=self.partition, at=self.count)
            self.count += len(records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impressions", default="redis://127.0.0.1:6379/impressions")
    parser.add_argument("--actions", default="redis://127.0.0.1:6379/actions")
    parser.add_argument("--rate", type=float, default=500.0, help="impressions per second")
    parser.add_argument("--delay", type=float, default=3.0, help="seconds from an impression to its click, on average")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long to run; by default until Ctrl-C")
    flags = parser.parse_args()
    made, number = random.Random(1), 0
    to_show, to_act = Numbered(flags.impressions), Numbered(flags.actions)
    waiting: list[tuple[float, str]] = []
    begun = time.time()
    try:
        while (now := time.time()) < begun + flags.seconds:
            shown = [impression(made, number + i, now) for i in range(int((now - begun) * flags.rate) - number)]
            number += len(shown)
            for one in shown:
                if clicks(made, one):
                    heapq.heappush(waiting, (now + made.expovariate(1 / flags.delay), one["request"]))
            acted = []
            while waiting and waiting[0][0] <= now:
                at, request = heapq.heappop(waiting)
                acted.append({"request": request, "time": round(at, 6), "kind": "click"})
            to_show.append(shown)
            to_act.append(acted)
            time.sleep(0.05)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
