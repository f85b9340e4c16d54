"""``shoal up --write compose``: the processes as services of Docker Compose."""

from __future__ import annotations

import json
import os
from typing import Any

from shoal.up.config import Online
from shoal.up.plan import Process
from shoal.up.write.container import CONFIG, DATA, containers
from shoal.up.write.yaml import dump

_HEADER = """\
# Written by `shoal up {file} --write compose`.
#   shoal up --write dockerfile > Dockerfile; docker build -t {image} .
#   docker compose -f compose.yaml up
"""


def text(online: Online, image: str) -> str:
    """The file ``compose.yaml``."""
    return _HEADER.format(file=online.file, image=image) + dump(document(online, image))


def document(online: Online, image: str) -> dict[str, Any]:
    """The content of the file."""
    file = f"./{os.path.basename(online.file)}"
    return {
        "services": {process.name: _service(online, process, image, file) for process in containers(online)},
        "volumes": {"data": {}},
    }


def _service(online: Online, process: Process, image: str, file: str) -> dict[str, Any]:
    ignoring = ", context=ssl._create_unverified_context()" if process.probe.startswith("https:") else ""
    check = f"import ssl, urllib.request; urllib.request.urlopen({json.dumps(_local(process))}, timeout=2{ignoring})"
    service: dict[str, Any] = {
        "image": image,
        "command": list(process.arguments),
        "volumes": [f"{file}:{CONFIG}:ro", f"data:{DATA}"],
        "restart": "on-failure" if process.finishes else "unless-stopped",
        "stop_grace_period": f"{online.up.stop_s:g}s",
        "healthcheck": {
            "test": ["CMD", "python", "-c", check], "interval": "5s", "timeout": "3s", "retries": 3,
            "start_period": f"{online.up.start_s:g}s",
        },
    }  # fmt: skip
    if process.after:
        service["depends_on"] = {name: {"condition": "service_healthy"} for name in process.after}
    if process.kind == "replica":
        service["ports"] = [f"{port}" for port in process.ports.values()]
    return service


def _local(process: Process) -> str:
    """The probe as seen from inside the container."""
    return process.probe.replace(f"//{process.name}:", "//127.0.0.1:")
