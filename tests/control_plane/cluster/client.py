"""The official Python client, for a kubeconfig. A module of its own: importing the client takes a second."""

from __future__ import annotations

from pathlib import Path

from kubernetes import client, config


def connect(kubeconfig: Path) -> client.ApiClient:
    """An ``ApiClient`` that acts as this kubeconfig says; use it with ``with``."""
    connected = config.new_client_from_config(str(kubeconfig))  # type: ignore[no-untyped-call]
    assert isinstance(connected, client.ApiClient)
    return connected
