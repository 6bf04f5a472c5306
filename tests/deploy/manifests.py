"""The fields of Kubernetes and KubeRay that deploy/kuberay uses, and their allowed values.

The operator's own schema is a megabyte of YAML, mostly Kubernetes' pods. This one only has what is used here. It finds
misspelt or misplaced fields, and numbers in place of texts, without a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

# A dict is an object with these fields, a list is a list of such values, a tuple is an object with arbitrary names.
Shape = Any

QUANTITY = re.compile(r"(\d+(\.\d+)?|\d+(m|Ki|[MGT]i?))")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
# Quoted in YAML, as Kubernetes requires.
TEXT = re.compile(r".*", re.DOTALL)

METADATA: Shape = {"name": NAME, "labels": (TEXT,), "annotations": (TEXT,)}
PROBE: Shape = {
    "httpGet": {"path": TEXT, "port": int},
    "tcpSocket": {"port": int},
    "periodSeconds": int,
    "timeoutSeconds": int,
    "failureThreshold": int,
}
CONTAINER: Shape = {
    "name": NAME,
    "image": TEXT,
    "imagePullPolicy": re.compile("Always|IfNotPresent|Never"),
    "command": [TEXT],
    "args": [TEXT],
    "env": [{"name": TEXT, "value": TEXT, "valueFrom": {"secretKeyRef": {"name": NAME, "key": TEXT}}}],
    "ports": [{"name": NAME, "containerPort": int}],
    "readinessProbe": PROBE,
    "startupProbe": PROBE,
    "livenessProbe": PROBE,
    "resources": {"requests": (QUANTITY,), "limits": (QUANTITY,)},
    "securityContext": {"allowPrivilegeEscalation": bool, "capabilities": {"drop": [TEXT]}},
    "volumeMounts": [{"name": NAME, "mountPath": TEXT, "readOnly": bool}],
}
VOLUME: Shape = {
    "name": NAME,
    "emptyDir": {"medium": TEXT, "sizeLimit": QUANTITY},
    "secret": {"secretName": NAME, "defaultMode": int, "items": [{"key": TEXT, "path": TEXT}]},
    "persistentVolumeClaim": {"claimName": NAME},
}
POD: Shape = {
    "metadata": METADATA,
    "spec": {
        "terminationGracePeriodSeconds": int,
        "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "runAsGroup": int, "fsGroup": int},
        "initContainers": [CONTAINER],
        "containers": [CONTAINER],
        "volumes": [VOLUME],
        "nodeSelector": (TEXT,),
        "tolerations": [{"key": TEXT, "operator": TEXT, "value": TEXT, "effect": TEXT}],
    },
}
CLUSTER: Shape = {
    "rayVersion": TEXT,
    "authOptions": {"mode": re.compile("token"), "secretName": NAME},
    "headGroupSpec": {"rayStartParams": (TEXT,), "template": POD},
    "workerGroupSpecs": [
        {
            "groupName": NAME,
            "replicas": int,
            "minReplicas": int,
            "maxReplicas": int,
            "rayStartParams": (TEXT,),
            "template": POD,
        }
    ],
}
CLAIM: Shape = {
    "metadata": METADATA,
    "spec": {"accessModes": [TEXT], "storageClassName": NAME, "resources": {"requests": (QUANTITY,)}},
}
SPECS: dict[tuple[str, str], Shape] = {
    ("ray.io/v1", "RayCluster"): CLUSTER,
    ("ray.io/v1", "RayJob"): {
        "entrypoint": TEXT,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "backoffLimit": int,
        "rayClusterSpec": CLUSTER,
    },
    ("v1", "Service"): {
        "type": re.compile("ClusterIP|NodePort|LoadBalancer"),
        "selector": (TEXT,),
        "ports": [{"name": NAME, "port": int, "targetPort": int}],
    },
    ("apps/v1", "StatefulSet"): {
        "serviceName": NAME,
        "replicas": int,
        "selector": {"matchLabels": (TEXT,)},
        "template": POD,
        "volumeClaimTemplates": [CLAIM],
    },
}


def errors(manifest: dict[str, Any]) -> list[str]:
    """Returns the errors, each with its path."""
    kind = (manifest["apiVersion"], manifest["kind"])
    if kind not in SPECS:
        return [f"{' '.join(kind)}: is none of {sorted(SPECS)}"]
    shape = {"apiVersion": TEXT, "kind": TEXT, "metadata": METADATA, "spec": SPECS[kind]}
    return [*_errors(manifest, shape, manifest["kind"])]


def _errors(value: Any, shape: Shape, path: str) -> Iterator[str]:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            yield f"{path}: {value!r} is no object"
            return
        for name, each in value.items():
            if name in shape:
                yield from _errors(each, shape[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}: is none of {sorted(shape)}"
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{path}: {value!r} is no list"
            return
        for number, each in enumerate(value):
            yield from _errors(each, shape[0], f"{path}[{number}]")
    elif isinstance(shape, tuple):
        if not isinstance(value, dict):
            yield f"{path}: {value!r} is no object"
            return
        for name, each in value.items():
            yield from _errors(each, shape[0], f"{path}.{name}")
    elif isinstance(shape, type):
        # True is an int in Python.
        if type(value) is not shape:
            yield f"{path}: {value!r} is no {shape.__name__}"
    elif not isinstance(value, str) or not shape.fullmatch(value):
        yield f"{path}: {value!r} does not match {shape.pattern}"
