"""A Prometheus configuration, alert rules and a Grafana dashboard for a running system."""

import json
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ALERTS, DASHBOARD, CONFIG = "shoal-alerts.yml", "shoal-dashboard.json", "prometheus.yml"

_HEAD = """\
# prometheus --config.file={config}
# Written by `shoal monitor`; run it again if the addresses of processes change.
global:
  scrape_interval: 15s
  evaluation_interval: 15s
rule_files: [{alerts}]
scrape_configs:
  - job_name: shoal
"""
_SECURE = """\
    # Ports with TLS and tokens:
    # scheme: https
    # tls_config: {ca_file: ca.pem}
    # authorization: {credentials_file: token}
"""


def alert_rules() -> str:
    """The alert rules in Prometheus' format."""
    return (HERE / "alerts.yml").read_text()


def dashboard() -> str:
    """The dashboard in Grafana's import format."""
    return (HERE / "dashboard.json").read_text()


def prometheus_config(targets: Sequence[str], discovered: Sequence[str] = ()) -> str:
    """A Prometheus configuration that scrapes the given processes.

    Args:
        targets: the processes' ``host:port``.
        discovered: URLs that list processes, such as the one on the page of `shoal up`.
    """
    lines = [_HEAD.format(config=CONFIG, alerts=ALERTS), _SECURE]
    if targets or not discovered:
        lines.append(f"    static_configs: [{{targets: {json.dumps(list(targets))}}}]\n")
    if discovered:
        lines.append(f"    http_sd_configs: [{', '.join(f'{{url: {json.dumps(url)}}}' for url in discovered)}]\n")
    return "".join(lines)


def write(folder: Path, targets: Sequence[str], discovered: Sequence[str] = ()) -> list[Path]:
    """Write all three files into a folder, replacing existing ones; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {CONFIG: prometheus_config(targets, discovered), ALERTS: alert_rules(), DASHBOARD: dashboard()}
    for name, text in content.items():
        (folder / name).write_text(text)
    return [folder / name for name in content]
