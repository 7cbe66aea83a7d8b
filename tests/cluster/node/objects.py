"""The API objects of a node: the name server's Service, and volumes that pods may write to as any user.

There is no provisioner: a pool of ``local`` volumes is made beforehand, and a claim is bound to one of them when the
first pod that uses it is scheduled. A volume is used once. (The directories of the provisioner that is built into the
controller manager belong to root, and the kubelet gives them to nobody else.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import network
from .components import NODE_NAME

STORAGE_CLASS = "standard"
VOLUMES = 64
VOLUME_SIZE = "100Gi"
"""What a claim can ask for; nobody measures it."""


def name_server(port: int) -> list[dict[str, Any]]:
    """The Service ``kube-dns``, leading to CoreDNS on the node's own address."""
    ports = [
        {"name": name, "port": 53, "protocol": protocol} for name, protocol in (("dns", "UDP"), ("dns-tcp", "TCP"))
    ]
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system"},
            "spec": {
                "clusterIP": network.DNS_ADDRESS,
                "ports": [{**each, "targetPort": port} for each in ports],
            },
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "kube-dns-node",
                "namespace": "kube-system",
                "labels": {"kubernetes.io/service-name": "kube-dns"},
            },
            "addressType": "IPv4",
            "ports": [{**each, "port": port} for each in ports],
            "endpoints": [{"addresses": [network.NODE_ADDRESS], "conditions": {"ready": True}}],
        },
    ]


def storage_class() -> dict[str, Any]:
    """The default class, of the volumes made beforehand."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }


def volume_pool(directory: Path) -> list[dict[str, Any]]:
    """Make a directory for each volume, which every user may write to; return the volumes."""
    volumes = []
    for number in range(VOLUMES):
        path = directory / f"volume-{number:02}"
        path.mkdir(parents=True)
        path.chmod(0o777)
        volumes.append(local_volume(path.name, path, STORAGE_CLASS))
    return volumes


def local_volume(name: str, path: Path, storage_class_name: str) -> dict[str, Any]:
    """A volume that is a directory of this machine; it is kept, and not used again, when its claim goes."""
    node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE_NAME]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": VOLUME_SIZE},
            "accessModes": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": storage_class_name,
            "local": {"path": str(path)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [node]}]}},
        },
    }
