"""Settings of the operator, from environment variables ``INFLIGHT_<FIELD>``.

Whatever a job can say itself is not a setting.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from inflight_operator import names

PREFIX: Final = "INFLIGHT_"
DEFAULT_IMAGE: Final = "inflight-runtime"
JSON_FIELDS: Final = frozenset({"operator_labels", "scrape_from"})
"""Fields that are written as JSON objects."""


class SettingsError(ValueError):
    """An environment variable cannot be used; the message names each one, its value and the reason."""


class Settings(BaseModel):
    """What an installation decides for all of its jobs."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    namespace: str = ""
    """The one namespace to work in; empty for all of them."""
    lease_namespace: str = ""
    """Namespace of the Lease that decides which of several operators acts; empty for an operator that is alone."""
    workers: int = Field(default=8, ge=1, le=100)
    """Jobs worked on at once."""
    http_host: str = "0.0.0.0"  # noqa: S104  the pod's own network
    """Address that probes and metrics are served on."""
    http_port: int = Field(default=8080, ge=0, le=65_535)
    """Its port; 0 for any free one."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least level that is logged."""
    log_format: Literal["json", "text"] = "json"
    """How lines of the log are written."""
    registry: str = ""
    """Registry and path put in front of the default images, for instance of a mirror."""
    coordinator_image: str = ""
    """Image of coordinators; empty for the default. A job's own image wins, here and below."""
    inference_image: str = ""
    """Image of inference servers."""
    actor_image: str = ""
    """Image of actors, and of the Job that fetches a model."""
    trainer_image: str = ""
    """Image of trainers."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets for private registries, comma-separated; each is looked for in the job's own namespace."""
    coordinator_url: str = "http://{service}.{namespace}.svc:{port}"
    """How the operator reaches a coordinator; another pattern where it runs outside of the cluster."""
    operator_namespace: str = ""
    """Namespace of the operator's own pods, let in by the jobs' NetworkPolicies; empty where it runs outside."""
    operator_labels: dict[str, str] = Field(
        default_factory=lambda: {"app.kubernetes.io/name": "inflight", "app.kubernetes.io/component": "operator"}
    )
    """Labels of these pods."""
    scrape_from: dict[str, Any] = Field(default_factory=dict)
    """NetworkPolicyPeer of the monitoring that may scrape the jobs' metrics; empty for none."""
    storage_class: str = ""
    """StorageClass of claims whose job names none; empty for the cluster's default."""
    model_storage: str = "100Gi"
    """Size of the claim that a hub model is fetched into."""
    model_access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = "ReadWriteMany"
    """Access mode of that claim: servers on several nodes read it at once; ReadWriteOnce allows that on one only."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource that a tensor-parallel server asks for where the job names no GPUs."""
    shm_size: str = "8Gi"
    """Bound of /dev/shm; what is used of it counts against the container's memory."""
    run_as: int | None = 10001
    """User and group of all pods; ``none`` leaves them to the cluster (OpenShift assigns its own)."""
    coordinator_startup_s: int = Field(default=300, ge=10)
    """Seconds a coordinator may take until it answers."""
    inference_startup_s: int = Field(default=2700, ge=10)
    """Seconds a server may take until it has loaded the model."""
    actor_startup_s: int = Field(default=900, ge=10)
    """Seconds an environment may take in its import and constructor."""

    @field_validator("run_as", mode="before")
    @classmethod
    def _none_in_words(cls, value: object) -> object:
        return None if value == "none" else value

    @field_validator("image_pull_secrets", mode="before")
    @classmethod
    def _comma_separated(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @field_validator("coordinator_url")
    @classmethod
    def _a_pattern(cls, value: str) -> str:
        try:
            value.format(service="s", namespace="n", port=1)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError("only {service}, {namespace} and {port} are filled in") from error
        return value

    def image(self, role: str) -> str:
        """The image of a role whose job names none."""
        given = str(getattr(self, f"{role}_image"))
        if given:
            return given
        image = f"{DEFAULT_IMAGE}:{_version()}"
        return f"{self.registry.rstrip('/')}/{image}" if self.registry else image

    def coordinator_address(self, job: str, namespace: str, port: int) -> str:
        """URL under which the operator reaches a job's coordinator."""
        return self.coordinator_url.format(service=names.coordinator(job), namespace=namespace, port=port)


@functools.cache
def _version() -> str:
    # Read from a file each time, which takes longer than to build all children.
    return importlib.metadata.version("inflight")


def settings_from(environ: Mapping[str, str]) -> Settings:
    """Read the settings; a variable that is not set or empty leaves the default.

    Raises:
        SettingsError: a variable has a value that cannot be.
    """
    given: dict[str, Any] = {}
    for field in Settings.model_fields:
        text = environ.get(PREFIX + field.upper(), "")
        if not text:
            continue
        try:
            given[field] = json.loads(text) if field in JSON_FIELDS else text
        except ValueError as error:
            raise SettingsError(f"{PREFIX}{field.upper()}={text!r} is not a JSON object: {error}") from error
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        found = [
            f"{PREFIX}{str(item['loc'][0]).upper()}={environ[PREFIX + str(item['loc'][0]).upper()]!r}: {item['msg']}"
            for item in error.errors()
        ]
        raise SettingsError("; ".join(found)) from error
