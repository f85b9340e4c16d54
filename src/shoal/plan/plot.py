"""Plot a plan: throughput, the parts of a step, and memory by number of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.errors import missing_extra
from shoal.plan.config import Plan
from shoal.plan.model import LAYOUTS, Estimate

_NAMES = {
    "all_to_all": "all-to-all, by row",
    "planned": "all-to-all, each table in the best way",
    "parameter_server": "parameter servers",
}


def draw(found: Sequence[Estimate], plan: Plan, path: Path) -> None:
    """Write the plot to ``path`` as PNG."""
    try:
        import matplotlib
    except ImportError:
        raise missing_extra("matplotlib", "cli") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(LAYOUTS), figsize=(17, 8))
    of = {layout: [e for e in found if e.layout == layout] for layout in LAYOUTS}
    speed, memory, *rest = axes[0]
    for axis in rest:
        axis.axis("off")
    for layout, each in of.items():
        hosts = [e.hosts for e in each]
        speed.plot(hosts, [e.samples_per_s for e in each], "o-", label=_NAMES[layout])
        memory.plot(hosts, [e.memory_bytes / 1e9 for e in each], "o-", label=_NAMES[layout])
    first = of["all_to_all"][0]
    ideal = [first.samples_per_s * e.hosts / first.hosts for e in of["all_to_all"]]
    speed.plot([e.hosts for e in of["all_to_all"]], ideal, ":", color="gray", label="ideal")
    if plan.model.samples_per_day:
        speed.axhline(plan.model.samples_per_day / 86400, color="tab:red", ls="--", label="the stream")
    memory.axhline(plan.host.memory_gb, color="tab:red", ls="--", label="memory of a host")
    speed.set(xscale="log", yscale="log", xlabel="workers", ylabel="samples/s", title="throughput")
    memory.set(xscale="log", yscale="log", xlabel="workers", ylabel="GB", title="memory used on a host with rows")
    speed.legend()
    memory.legend()
    parts = list(dict.fromkeys(part for e in found for part in e.seconds))
    colours = {part: f"C{i}" for i, part in enumerate(parts)}
    for axis, (layout, each) in zip(axes[1], of.items(), strict=True):
        bottom = [0.0] * len(each)
        for part in parts:
            height = [1e3 * e.seconds.get(part, 0.0) for e in each]
            axis.bar([str(e.hosts) for e in each], height, bottom=bottom, label=part, color=colours[part])
            bottom = [a + b for a, b in zip(bottom, height, strict=True)]
        axis.set(xlabel="workers", ylabel="ms", title=f"a step: {_NAMES[layout]}")
        axis.set_ylim(0, 1.3 * max(bottom))
        axis.legend(fontsize="small", ncols=4, loc="upper left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
