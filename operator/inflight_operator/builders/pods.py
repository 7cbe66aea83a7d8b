"""The pod template of every role: the defaults that all share, then the job's overlay, then what must stay ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from inflight_operator import names
from inflight_operator.builders.build import Build
from inflight_operator.builders.resources import Requirements
from inflight_operator.merge import MergeError, merge_template
from inflight_runtime.api.placement import PodRole
from inflight_runtime.config.pod import ADDRESS_VARIABLE, NAME_VARIABLE

CONFIG_DIR: Final = "/etc/inflight"
TOKEN_DIR: Final = "/var/run/inflight"  # noqa: S105  a directory
TOKEN_KEY: Final = "token"  # noqa: S105  a key of the Secret
TOKEN_MODE: Final = 0o440
CODE_DIR: Final = "/opt/inflight/environment"
MODEL_DIR: Final = "/model"
FETCHED_DIR: Final = "/fetched"
DATA_DIR: Final = "/var/lib/inflight"
CHECKPOINT_DIR: Final = "/checkpoints"
HOME: Final = "/tmp"  # noqa: S108  an emptyDir of the pod's own
USER: Final = "inflight"
OFFLINE: Final = ({"name": "HF_HUB_OFFLINE", "value": "1"},)
"""Roles read the model from a directory: a look at the hub would only cost time, or the run where there is no net."""
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PROBE_TIMEOUT_S: Final = 5
LIVENESS_PERIOD_S: Final = 10
LIVENESS_FAILURES: Final = 6
READINESS_PERIOD_S: Final = 5


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume and where the container sees it.

    Attributes:
        name: of the volume.
        path: in the container.
        source: the volume's source.
        read_only: whether it may not be written to.
    """

    name: str
    path: str
    source: dict[str, Any]
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Pod:
    """What is special about a role's pod.

    Attributes:
        role: names the container.
        image: of the container.
        command: its whole command line.
        resources: its requests and limits.
        grace_s: seconds between SIGTERM and SIGKILL.
        mounts: volumes besides those that every pod has.
        environment: variables besides those that every pod has.
        ports: container ports by name.
        probes: ``startupProbe`` and the like.
        threads: CPU threads of each of the container's processes.
        restart_policy: of the pod; empty for the default.
        shm: whether the container gets a /dev/shm of its own size.
    """

    role: str
    image: str
    command: list[str]
    resources: Requirements
    grace_s: int
    mounts: tuple[Mount, ...] = ()
    environment: tuple[dict[str, Any], ...] = ()
    ports: dict[str, int] = field(default_factory=dict)
    probes: dict[str, Any] = field(default_factory=dict)
    threads: int = 1
    restart_policy: str = ""
    shm: bool = True


def pod_template(build: Build, pod: Pod, spec: PodRole | None) -> dict[str, Any]:
    """The PodTemplateSpec of a role.

    Args:
        build: the job.
        pod: what is special about the role.
        spec: the role's part of the job, whose overlay is merged in; ``None`` for a helper.

    Raises:
        MergeError: the overlay cannot be merged, or takes the role's own container away.
    """
    template: dict[str, Any] = {"metadata": {"labels": {}}, "spec": _pod_spec(build, pod)}
    if spec is not None:
        for part in ("metadata", "spec"):
            if not isinstance(spec.pod_template.get(part), dict | None):
                raise MergeError(f"podTemplate.{part}: must be an object")
        template = merge_template(template, spec.pod_template)
    containers = template["spec"].get("containers") if isinstance(template.get("spec"), dict) else None
    if not any(container["name"] == pod.role for container in containers or []):
        raise MergeError(f"podTemplate.spec.containers: the container {pod.role} must stay")
    metadata = template.setdefault("metadata", {})
    # Selectors and the JobSet's failure policy rest on these, so they are not the overlay's.
    metadata["labels"] = {**(metadata.get("labels") or {}), **names.labels(build.name, pod.role)}
    if pod.restart_policy:
        template["spec"]["restartPolicy"] = pod.restart_policy
    return template


def http_probe(path: str, port: str, *, period_s: int, failures: int) -> dict[str, Any]:
    """A probe that asks ``path``; it needs no token."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": PROBE_TIMEOUT_S,
        "failureThreshold": failures,
    }


def http_probes(port: str, startup_s: int) -> dict[str, Any]:
    """Start-up, liveness and readiness of a role that answers ``/healthz`` and ``/readyz``.

    Args:
        port: name of the container port.
        startup_s: seconds until the first answer, after which the container is started again.
    """
    period = 2 if startup_s <= 600 else 10
    return {
        "startupProbe": http_probe("/healthz", port, period_s=period, failures=-(-startup_s // period)),
        "livenessProbe": http_probe("/healthz", port, period_s=LIVENESS_PERIOD_S, failures=LIVENESS_FAILURES),
        "readinessProbe": http_probe("/readyz", port, period_s=READINESS_PERIOD_S, failures=2),
    }


def role_mounts(build: Build, config_map: str, role: str) -> tuple[Mount, ...]:
    """The role's own config file and the run's token."""
    file = f"{role}.json"
    config = {"configMap": {"name": config_map, "items": [{"key": file, "path": file}]}}
    token = {"secret": {"secretName": names.token(build.name), "defaultMode": TOKEN_MODE}}
    return (Mount("config", CONFIG_DIR, config, read_only=True), Mount("token", TOKEN_DIR, token, read_only=True))


def role_command(role: str) -> list[str]:
    """How a role is started."""
    return ["python", "-m", f"inflight_runtime.{role}", "--config", config_file(role)]


def config_file(role: str) -> str:
    """Path of a role's config in its container."""
    return f"{CONFIG_DIR}/{role}.json"


def claim(name: str) -> dict[str, Any]:
    """Volume source of a claim."""
    return {"persistentVolumeClaim": {"claimName": name}}


def role_image(build: Build, role: str, image: str | None) -> str:
    """The image that the run was started with; at a start the job's own, else the installation's."""
    return build.facts.images.get(role) or image or build.settings.image(role)


def container_security() -> dict[str, Any]:
    """Of every container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _pod_spec(build: Build, pod: Pod) -> dict[str, Any]:
    mounts = [*pod.mounts, Mount("tmp", HOME, {"emptyDir": {}})]
    if pod.shm:
        memory = {"emptyDir": {"medium": "Memory", "sizeLimit": build.settings.shm_size}}
        mounts.append(Mount("shm", "/dev/shm", memory))  # noqa: S108
    container: dict[str, Any] = {
        "name": pod.role,
        "image": pod.image,
        "command": pod.command,
        "env": [*_environment(pod), *pod.environment],
        "resources": pod.resources,
        "securityContext": container_security(),
        # What a failed process said last becomes the reason in the job's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [_volume_mount(mount) for mount in mounts],
    }
    if pod.ports:
        container["ports"] = [{"name": name, "containerPort": port} for name, port in pod.ports.items()]
    container |= pod.probes
    spec: dict[str, Any] = {
        "serviceAccountName": names.account(build.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(build.settings.run_as),
        "terminationGracePeriodSeconds": pod.grace_s,
        "containers": [container],
        "volumes": [{"name": mount.name, **mount.source} for mount in mounts],
    }
    if build.settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in build.settings.image_pull_secrets]
    priority = build.job.spec.scheduling.priority_class_name
    if priority is not None:
        spec["priorityClassName"] = priority
    return spec


def _pod_security(run_as: int | None) -> dict[str, Any]:
    security: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if run_as is not None:
        # The group owns the claims, so that a pod of another image can write to them as well.
        security |= {"runAsUser": run_as, "runAsGroup": run_as, "fsGroup": run_as}
        security["fsGroupChangePolicy"] = "OnRootMismatch"
    return security


def _environment(pod: Pod) -> list[dict[str, Any]]:
    return [
        _from_field(NAME_VARIABLE, "metadata.name"),
        _from_field(ADDRESS_VARIABLE, "status.podIP"),
        # The user has no entry in the image's passwd file, and its caches belong where it may write.
        {"name": "HOME", "value": HOME},
        {"name": "USER", "value": USER},
        {"name": "LOGNAME", "value": USER},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "TOKENIZERS_PARALLELISM", "value": "false"},
        *({"name": name, "value": str(pod.threads)} for name in THREAD_VARIABLES),
    ]


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _volume_mount(mount: Mount) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": mount.name, "mountPath": mount.path}
    if mount.read_only:
        entry["readOnly"] = True
    return entry
