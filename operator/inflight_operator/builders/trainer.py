"""The trainer: a JobSet of one indexed Job, one pod per node, in each the launcher of its ranks."""

from __future__ import annotations

from typing import Any, Final

from inflight_operator import names
from inflight_operator.builders.build import Build, Manifest
from inflight_operator.builders.claims import checkpoint_claim_name
from inflight_operator.builders.pods import (
    CHECKPOINT_DIR,
    OFFLINE,
    Mount,
    Pod,
    claim,
    config_file,
    pod_template,
    role_image,
    role_mounts,
)
from inflight_operator.builders.resources import threads_of
from inflight_operator.builders.wiring import Wiring

JOBSET_API: Final = "jobset.x-k8s.io/v1alpha2"
RENDEZVOUS_PORT: Final = 29_500
FAREWELL_S: Final = 60
"""What the launcher leaves its ranks after SIGTERM beyond ``stopSeconds``: a farewell takes 15 s at most."""
LAUNCHER_S: Final = 30
"""What a pod has beyond that."""
EXIT_BAD_INPUT: Final = 2
"""A trainer's exit code for a configuration, model or checkpoint that it cannot use."""
NODE_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def job_set(build: Build, wiring: Wiring) -> Manifest:
    """The trainer's JobSet.

    A failed pod fails its Job, and the JobSet starts all nodes anew, from the last checkpoint: torch cannot take in a
    single one. What a drain or a preemption does is not the trainer's fault and does not use up ``maxRestarts``; bad
    input fails the run at once, since no restart mends it.
    """
    nodes = build.job.spec.trainer.nodes
    labels = names.labels(build.name, names.TRAINER)
    job = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        # A Terminating pod still trains: a resumed run must not get a second trainer beside it.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": names.TRAINER, "operator": "In", "values": [EXIT_BAD_INPUT]},
                },
            ]
        },
        "template": pod_template(build, _pod(build, wiring), build.job.spec.trainer),
    }
    return {
        "apiVersion": JOBSET_API,
        "kind": "JobSet",
        "metadata": build.metadata(names.trainer(build.name), names.TRAINER),
        "spec": {
            "suspend": False,
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": build.job.spec.trainer.max_restarts,
                # Both have the reason PodFailurePolicy; the Job controller's message tells them apart.
                "rules": [
                    {
                        "name": "badInput",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                        "onJobFailureMessagePatterns": [rf"with exit code {EXIT_BAD_INPUT}\b"],
                    },
                    {
                        "name": "disruption",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                        "onJobFailureMessagePatterns": ["DisruptionTarget"],
                    },
                ],
            },
            "replicatedJobs": [
                {
                    "name": names.REPLICATED_JOB,
                    "replicas": 1,
                    "template": {"metadata": {"labels": labels}, "spec": job},
                }
            ],
        },
    }


def _pod(build: Build, wiring: Wiring) -> Pod:
    spec = build.job.spec.trainer
    return Pod(
        role=names.TRAINER,
        image=role_image(build, names.TRAINER, spec.image),
        command=["python", "-m", "inflight_runtime.trainer.launch", "--config", config_file(names.TRAINER)],
        resources=wiring.trainer,
        grace_s=build.job.spec.checkpoint.stop_seconds + FAREWELL_S + LAUNCHER_S,
        mounts=(
            *role_mounts(build, wiring.config_map, names.TRAINER),
            *wiring.model.mounts,
            Mount("checkpoints", CHECKPOINT_DIR, claim(checkpoint_claim_name(build))),
        ),
        environment=(*OFFLINE, *_torchrun(build)),
        ports={"rendezvous": RENDEZVOUS_PORT},
        threads=threads_of(wiring.trainer, spec.processes_per_node),
        restart_policy="Never",
    )


def _torchrun(build: Build) -> tuple[dict[str, Any], ...]:
    """Torchrun's options, as the environment variables that the launcher reads; the same on every node but its rank."""
    spec = build.job.spec.trainer
    values = {
        "PET_NNODES": str(spec.nodes),
        "PET_NPROC_PER_NODE": str(spec.processes_per_node),
        # One node meets nobody, and need not wait until its own name is known.
        "PET_MASTER_ADDR": names.trainer_pod_host(build.name, 0) if spec.nodes > 1 else "127.0.0.1",
        "PET_MASTER_PORT": str(RENDEZVOUS_PORT),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(build.job.spec.checkpoint.stop_seconds + FAREWELL_S),
    }
    rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": NODE_INDEX}}}
    return (*({"name": name, "value": value} for name, value in values.items()), rank)
