"""What a model server answered lately, for its status page and its metrics."""

import threading
import time
from collections import deque

import torch

from shoal.metrics import emit_counter, emit_timer


class Traffic:
    """How many requests of each kind came lately, and how they went."""

    window = 10.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, str, float, int]] = deque(maxlen=200_000)
        self.total = 0
        self.failed = 0

    def add(self, model: str, signature: str, code: int, seconds: float) -> None:
        now = time.monotonic()
        with self._lock:
            self.total += 1
            self.failed += bool(code)
            self._recent.append((now, f"{model} {signature}", seconds, code))
        tags = f"model_name={model}|signature_name={signature}"
        emit_timer("shoal_serving_latency_seconds", seconds, tags)
        if code:
            emit_counter("shoal_serving_errors", 1, f"{tags}|code={int(code)}")

    def recent(self) -> dict[str, dict[str, float]]:
        """``"model signature"`` -> qps, p50_ms, p99_ms, errors over the last seconds."""
        horizon = time.monotonic() - self.window
        with self._lock:
            recent = [each for each in self._recent if each[0] >= horizon]
        groups: dict[str, list[tuple[float, int]]] = {}
        for _, key, seconds, code in recent:
            groups.setdefault(key, []).append((seconds, code))
        result = {}
        for key, each in groups.items():
            times = torch.tensor([seconds for seconds, _ in each], dtype=torch.float64, device="cpu")
            result[key] = {
                "qps": len(each) / self.window,
                "p50_ms": float(times.quantile(0.5)) * 1e3 if len(times) < 1_000_000 else 0.0,
                "p99_ms": float(times.quantile(0.99)) * 1e3 if len(times) < 1_000_000 else 0.0,
                "errors": sum(1 for _, code in each if code),
            }
        return result
