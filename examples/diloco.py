"""Four peers train one small model with `shoal.gather`: local steps, a compressed update per window, an outer update.

    python examples/diloco.py

Each peer takes AdamW steps on its own data and publishes the change of its weights; every node applies the same
gathered update with plain SGD (most positions come from few peers, so a large momentum would overshoot). Two more peers
misbehave: one copies an honest peer and is flagged by the overlap check, one publishes NaN and is skipped with the
reason. The loss is compared with that of one process that trains on one peer's data.
"""

import tempfile

import torch

from shoal.gather import (
    Compressor,
    GatherPlan,
    GradientSpec,
    LocalDirStore,
    QuantSpec,
    UpdateLedger,
    dump_payload,
    pseudo_gradient,
    run_window,
)

WINDOWS, INNER_STEPS, BATCH = 12, 12, 64
HONEST, COPYCAT, POISONED = (0, 1, 2, 3), 4, 5


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))


def batches(seed: int):
    """An endless stream of one peer's data; all peers' data follow the same hidden rule."""
    rule = torch.randn(32, 8, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(BATCH, 32, generator=generator)
        yield x, torch.tanh(x @ rule / 4)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data, steps: int) -> None:
    for _ in range(steps):
        x, y = next(data)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model: torch.nn.Module) -> float:
    x, y = next(batches(12345))
    return float(torch.nn.functional.mse_loss(model(x), y))


class Peer:
    """An honest peer: a copy of the model, its data, its inner optimizer and its compressor."""

    def __init__(self, uid: int, spec: GradientSpec) -> None:
        self.uid, self.data, self.model = uid, batches(uid), make_model()
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.compressor = Compressor(spec)

    def publish(self, shared: torch.nn.Module, window: int, store: LocalDirStore) -> bytes:
        self.model.load_state_dict(shared.state_dict())
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        train(self.model, self.inner, self.data, INNER_STEPS)
        gradient = pseudo_gradient(before, self.model)
        data = dump_payload(self.compressor.compress(gradient, global_step=window * INNER_STEPS, window=window))
        store.put(window, self.uid, data)
        return data


def main() -> dict[str, object]:
    torch.set_num_threads(1)  # the tensors are too small for more threads
    shared = make_model()
    spec = GradientSpec.from_model(shared, target_chunk=16, topk=64, quant=QuantSpec(bins=16, range_sigmas=6))
    outer = torch.optim.SGD(shared.parameters(), lr=0.7)
    peers, ledger = [Peer(uid, spec) for uid in HONEST], UpdateLedger()
    alone = make_model()
    alone_optimizer, alone_data = torch.optim.AdamW(alone.parameters(), lr=3e-3), batches(0)
    losses, alone_losses, flagged, skipped = [evaluate(shared)], [evaluate(alone)], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        store = LocalDirStore(folder)
        for window in range(WINDOWS):
            published = [peer.publish(shared, window, store) for peer in peers]
            store.put(window, COPYCAT, published[2])  # published after the original, so the copy is flagged
            poison = Compressor(spec).compress({p.name: torch.randn(p.shape) for p in spec.params}, window=window)
            state = poison["state_dict"]
            state["0.weightquant_params"] = (float("nan"), *state["0.weightquant_params"][1:])
            store.put(window, POISONED, dump_payload(poison))
            plan = GatherPlan(window, [*HONEST, COPYCAT, POISONED])
            report = run_window(
                shared, outer, plan, spec=spec, store=store, ledger=ledger, overlap_threshold=0.9, emit_artifact=False
            )
            flagged, skipped = report.overlap.uids_over_thresh, report.result.skip_reasons
            train(alone, alone_optimizer, alone_data, INNER_STEPS)
            losses.append(evaluate(shared))
            alone_losses.append(evaluate(alone))
            print(
                f"window {window:2}: {report.decision} {len(report.result.uids)} peers, loss {losses[-1]:.4f} "
                f"(one process {alone_losses[-1]:.4f}), flagged {flagged}, skipped {skipped}"
            )
    return {"losses": losses, "alone": alone_losses, "flagged": flagged, "skipped": skipped, "step": ledger.step}


if __name__ == "__main__":
    main()
