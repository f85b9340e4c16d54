"""``shoal up --write k8s``: the processes as StatefulSets of Kubernetes, with one volume and one ConfigMap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.up.config import Online
from shoal.up.plan import Process
from shoal.up.write.container import CONFIG, DATA, containers
from shoal.up.write.yaml import dump

_HEADER = """\
# Written by `shoal up {file} --write k8s`.
#   shoal up --write dockerfile > Dockerfile; docker build -t {image} .    (and push it to the cluster's image registry)
#   kubectl apply -f online.yaml
# Several pods must be able to write the volume (ReadWriteMany). Kubernetes restarts processes that end.
"""


def text(online: Online, image: str) -> str:
    """The file ``online.yaml``."""
    return _HEADER.format(file=online.file, image=image) + "---\n".join(map(dump, documents(online, image)))


def documents(online: Online, image: str) -> list[dict[str, Any]]:
    """The objects, in the order in which they are applied."""
    name = _name(online.model)
    found: list[dict[str, Any]] = [
        {
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-config"},
            "data": {Path(CONFIG).name: Path(online.file).read_text()},
        },
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": f"{name}-data"},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Gi"}}},
        },
    ]  # fmt: skip
    for process in containers(online):
        found += [_service(process, name), _set(online, process, name, image)]
    return found


def _service(process: Process, name: str) -> dict[str, Any]:
    """A headless service that makes the process's name a host, even before the pod is ready."""
    ports = [{"name": port, "port": number} for port, number in process.ports.items()]
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": process.name, "labels": {"app": name}},
        "spec": {
            "clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(process, name), "ports": ports
        },
    }  # fmt: skip


def _set(online: Online, process: Process, name: str, image: str) -> dict[str, Any]:
    path, port = process.probe.rpartition("/")[2], int(process.metrics.rpartition(":")[2])
    scheme = {"scheme": "HTTPS"} if process.probe.startswith("https:") else {}
    probe = {"httpGet": {"path": f"/{path}", "port": port, **scheme}, "periodSeconds": 5, "timeoutSeconds": 3}
    container = {
        "name": process.kind, "image": image, "args": list(process.arguments),
        "ports": [{"name": each, "containerPort": number} for each, number in process.ports.items()],
        "readinessProbe": probe,
        "volumeMounts": [
            {"name": "config", "mountPath": str(Path(CONFIG).parent), "readOnly": True},
            {"name": "data", "mountPath": DATA},
        ],
    }  # fmt: skip
    pod = {
        "terminationGracePeriodSeconds": max(1, round(online.up.stop_s)),
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": f"{name}-config"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": f"{name}-data"}},
        ],
    }
    return {
        "apiVersion": "apps/v1", "kind": "StatefulSet",
        "metadata": {"name": process.name, "labels": {"app": name}},
        "spec": {
            "replicas": 1, "serviceName": process.name, "selector": {"matchLabels": _labels(process, name)},
            "template": {"metadata": {"labels": _labels(process, name)}, "spec": pod},
        },
    }  # fmt: skip


def _labels(process: Process, name: str) -> dict[str, str]:
    return {"app": name, "process": process.name}


def _name(model: str) -> str:
    """A model's name in the form Kubernetes accepts: lower case letters, digits and dashes."""
    plain = "".join(c if c.isalnum() and c.isascii() else "-" for c in model.lower()).strip("-")
    return plain[:40] or "shoal"
