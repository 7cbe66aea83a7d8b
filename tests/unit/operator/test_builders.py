"""What the children of a job must be, rule by rule."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from inflight_operator import names
from inflight_operator.builders import Child, Facts, build_children, resolved_images
from inflight_operator.builders.build import desired_hash
from inflight_operator.merge import MergeError
from inflight_runtime.api import RLTrainingJob
from inflight_runtime.config import roles
from inflight_runtime.local import launch
from inflight_runtime.trainer.failure import EXIT_BAD_INPUT
from support.cluster_jobs import (
    CODE,
    FACTS,
    SETTINGS,
    UID,
    children,
    container_of,
    find,
    make_job,
    on_nodes,
    template_of,
    workloads,
)

HUB = {"source": "example-org/model-1b"}
KINDS = [
    "ServiceAccount",
    "Secret",
    "ConfigMap",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "PersistentVolumeClaim",
    "Service",
    "StatefulSet",
    "JobSet",
    "StatefulSet",
    "Deployment",
]
ROLE_CONFIGS: dict[str, type[roles.RoleModel]] = {
    "coordinator": roles.CoordinatorConfig,
    "inference": roles.InferenceConfig,
    "actor": roles.ActorConfig,
    "trainer": roles.TrainerConfig,
}


def config_of(found: list[Child], role: str) -> Any:
    """A role's config as its pod reads it."""
    config_map = next(child.manifest for child in found if child.kind == "ConfigMap" and child.role == names.CONFIG)
    return ROLE_CONFIGS[role].model_validate_json(config_map["data"][f"{role}.json"])


def with_overlay(role: str, overlay: dict[str, Any]) -> RLTrainingJob:
    """A job with an overlay that nobody has checked: most of what the builders refuse is refused before them."""
    spec = make_job().spec
    section = getattr(spec, role).model_copy(update={"pod_template": overlay})
    return make_job().model_copy(update={"spec": spec.model_copy(update={role: section})})


def volumes(template: dict[str, Any]) -> dict[str, Any]:
    return {volume["name"]: volume for volume in template["spec"]["volumes"]}


def environment(template: dict[str, Any], role: str) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container_of(template, role)["env"]}


# --- all children -----------------------------------------------------------------------------------------------------


def test_children_come_in_the_order_in_which_they_are_applied() -> None:
    kinds = [child.kind for child in children(make_job())]
    assert sorted(set(kinds), key=kinds.index) == list(dict.fromkeys(KINDS))
    workload = [child.role for child in children(make_job(model=HUB)) if child.kind in ("StatefulSet", "Job", "JobSet")]
    assert workload == ["coordinator", "model", "trainer", "inference"]


def test_every_child_belongs_to_the_job_and_is_found_by_the_watch() -> None:
    for child in children(make_job(model=HUB, environment={"configMap": "code"}), code=CODE):
        metadata = child.manifest["metadata"]
        assert metadata["namespace"] == "team-a"
        key, value = names.WATCH_SELECTOR.split("=")
        assert metadata["labels"][key] == value
        assert metadata["labels"][names.JOB_LABEL] == metadata["labels"]["app.kubernetes.io/instance"] == "letters"
        assert metadata["annotations"][names.HASH_ANNOTATION] == desired_hash(child.manifest)
        if child.name == "letters-checkpoint":
            continue
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("RLTrainingJob", "letters", UID)
        assert owner["controller"] is owner["blockOwnerDeletion"] is True


def test_labels_of_the_job_reach_no_selector_and_no_queue_name_reaches_a_child() -> None:
    job = with_overlay("inference", {"metadata": {"labels": {"team": "a", names.JOB_LABEL: "other"}}})
    found = children(job)
    for child in found:
        assert "kueue.x-k8s.io/queue-name" not in child.manifest["metadata"]["labels"]
    servers = find(found, "StatefulSet", "letters-inference")
    assert servers["spec"]["selector"]["matchLabels"] == {names.JOB_LABEL: "letters", names.ROLE_LABEL: "inference"}
    labels = servers["spec"]["template"]["metadata"]["labels"]
    assert (labels["team"], labels[names.JOB_LABEL]) == ("a", "letters")


@pytest.mark.parametrize("role", ["coordinator", "inference", "actor"])
def test_every_selector_picks_the_pods_of_its_own_template(role: str) -> None:
    found = children(make_job())
    for child in found:
        if child.role != role or child.kind not in ("StatefulSet", "Deployment", "Service", "PodDisruptionBudget"):
            continue
        selector = child.manifest["spec"]["selector"]
        wanted = selector.get("matchLabels", selector)
        assert wanted == names.selector("letters", role)
        assert wanted.items() <= workloads(found)[role]["metadata"]["labels"].items()


# --- the hash ---------------------------------------------------------------------------------------------------------


def hashes(found: list[Child]) -> dict[tuple[str, str], str]:
    return {
        (child.kind, child.name): child.manifest["metadata"]["annotations"][names.HASH_ANNOTATION] for child in found
    }


@pytest.mark.parametrize(
    "facts",
    [{"inference_replicas": 5, "servers_at_start": 1}, {"token": "another"}],
)
def test_what_changes_at_run_time_is_not_in_the_hash(facts: dict[str, Any]) -> None:
    assert hashes(children(make_job(), **facts)) == hashes(children(make_job()))


def test_what_a_pod_is_made_from_is_in_the_hash() -> None:
    before = hashes(children(make_job()))
    after = hashes(children(make_job(inference={"maxConcurrent": 8})))
    changed = {name for kind, name in before.keys() & after.keys() if before[kind, name] != after[kind, name]}
    assert changed == {"letters-coordinator", "letters-inference", "letters-actor", "letters-t"}


def test_scaling_a_running_job_changes_nothing_but_replicas() -> None:
    started = children(make_job(inference={"replicas": 1}, actors={"replicas": 1}))
    scaled_job = make_job(inference={"replicas": 4}, actors={"replicas": 2})
    scaled = children(scaled_job, servers_at_start=1, actors_at_start=1)
    assert hashes(scaled) == hashes(started)
    assert find(scaled, "StatefulSet", "letters-inference")["spec"]["replicas"] == 4
    assert find(scaled, "Deployment")["spec"]["replicas"] == 2


def test_a_running_job_keeps_the_images_that_it_was_started_with() -> None:
    images = resolved_images(children(make_job(trainer={"image": "example.test/mine:1"})))
    assert images == dict.fromkeys(names.ROLES, "inflight-runtime:test") | {"trainer": "example.test/mine:1"}
    newer = SETTINGS.model_copy(update={f"{role}_image": "inflight-runtime:newer" for role in names.ROLES})
    job = make_job(trainer={"image": "example.test/mine:1"})
    assert resolved_images(children(job, newer, images=images)) == images
    assert resolved_images(children(job, newer))["inference"] == "inflight-runtime:newer"


def test_an_image_in_an_overlay_is_the_one_that_is_resolved() -> None:
    overlay = {"spec": {"containers": [{"name": "actor", "image": "example.test/env:2"}]}}
    assert resolved_images(children(make_job(actors={"podTemplate": overlay})))["actor"] == "example.test/env:2"


# --- replicas ---------------------------------------------------------------------------------------------------------


def test_replicas_that_the_spec_gives_are_ours_and_others_are_written_once() -> None:
    given = {child.role: child for child in children(make_job(inference={"replicas": 3}, actors={"replicas": 0}))}
    assert given["inference"].replicas_are_ours
    assert given["inference"].manifest["spec"]["replicas"] == 3
    assert given["actor"].manifest["spec"]["replicas"] == 0
    left = {child.role: child for child in children(make_job(), inference_replicas=6)}
    assert not left["inference"].replicas_are_ours
    assert not left["actor"].replicas_are_ours
    assert left["inference"].manifest["spec"]["replicas"] == 6
    assert left["actor"].manifest["spec"]["replicas"] == 1


def test_actors_keep_as_many_servers_full_as_are_written() -> None:
    found = children(make_job(), inference_replicas=2, actor_replicas=1)
    assert config_of(found, "actor").concurrency == 16


# --- pods -------------------------------------------------------------------------------------------------------------


def every_container(found: list[Child]) -> list[dict[str, Any]]:
    templates = workloads(found).values()
    return [
        container
        for template in templates
        for container in [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]
    ]


def test_no_pod_has_rights_or_more_than_it_needs() -> None:
    found = children(make_job(model={**HUB, "tokenizer": "example-org/tokenizer"}))
    assert find(found, "ServiceAccount")["automountServiceAccountToken"] is False
    for template in workloads(found).values():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["serviceAccountName"] == "letters-account"
        assert spec["enableServiceLinks"] is False
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security["runAsUser"] == security["fsGroup"] == 10001
    for container in every_container(found):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}


def test_the_cluster_may_choose_the_user() -> None:
    settings = SETTINGS.model_copy(update={"run_as": None})
    for template in workloads(children(make_job(), settings)).values():
        assert template["spec"]["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }


def test_every_container_has_requests_and_limits_of_the_same_resources() -> None:
    found = children(make_job(model={**HUB, "tokenizer": "example-org/tokenizer"}))
    assert len(every_container(found)) == 6
    for container in every_container(found):
        resources = container["resources"]
        assert resources["requests"].keys() == resources["limits"].keys() >= {"cpu", "memory"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"limits": {"cpu": 3}}, {"requests": {"cpu": "3", "memory": "1Gi"}, "limits": {"cpu": "3", "memory": "4Gi"}}),
        (
            {"requests": {"memory": "8Gi"}},
            {"requests": {"cpu": "500m", "memory": "8Gi"}, "limits": {"cpu": "4", "memory": "8Gi"}},
        ),
        (
            {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"cpu": 2, "memory": "2Gi", "nvidia.com/gpu": 1}},
            {
                "requests": {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"},
                "limits": {"cpu": "2", "memory": "2Gi", "nvidia.com/gpu": "1"},
            },
        ),
    ],
)
def test_a_resource_that_is_given_once_counts_for_request_and_limit(given: Any, expected: Any) -> None:
    template = workloads(children(make_job(actors={"resources": given})))["actor"]
    assert container_of(template, "actor")["resources"] == expected


def test_resources_of_an_overlay_do_not_contradict_the_defaults() -> None:
    container = {"name": "actor", "resources": {"requests": {"memory": "64Gi"}}}
    template = workloads(children(make_job(actors={"podTemplate": {"spec": {"containers": [container]}}})))["actor"]
    resources = container_of(template, "actor")["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == "64Gi"


def test_every_pod_can_write_where_it_must() -> None:
    for role, template in workloads(children(make_job(model=HUB))).items():
        assert volumes(template)["tmp"]["emptyDir"] == {}
        assert environment(template, role)["HOME"] == "/tmp"
        if role in ("inference", "actor", "trainer"):
            assert volumes(template)["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_no_secret_stands_in_a_config_map_an_environment_or_a_command() -> None:
    found = children(make_job(model={**HUB, "tokenSecretRef": {"name": "hub"}}))
    for child in found:
        if child.kind != "Secret":
            assert FACTS.token not in json.dumps(child.manifest)
    secret = find(found, "Secret")
    assert secret["immutable"] is True
    assert base64.b64decode(secret["data"]["token"]).decode() == FACTS.token
    for role in names.ROLES:
        template = workloads(found)[role]
        assert volumes(template)["token"]["secret"]["secretName"] == "letters-token"
        assert "HF_TOKEN" not in environment(template, role)
    assert "token" not in volumes(workloads(found)["model"])


def test_the_token_is_not_in_a_log_of_the_facts() -> None:
    assert FACTS.token not in repr(FACTS)


def test_every_role_is_started_with_its_own_config() -> None:
    found = children(make_job())
    config_map = next(child for child in found if child.role == names.CONFIG)
    assert config_map.manifest["immutable"] is True
    for role in names.ROLES:
        template = workloads(found)[role]
        source = volumes(template)["config"]["configMap"]
        assert source == {"name": config_map.name, "items": [{"key": f"{role}.json", "path": f"{role}.json"}]}
        assert container_of(template, role)["command"][-2:] == ["--config", f"/etc/inflight/{role}.json"]
        assert config_of(found, role).token_file.as_posix() == "/var/run/inflight/token"


def test_every_pod_may_pull_from_the_installations_private_registry_and_from_the_jobs_own() -> None:
    overlay = {"spec": {"imagePullSecrets": [{"name": "own"}]}}
    settings = SETTINGS.model_copy(update={"image_pull_secrets": ("mirror",)})
    found = workloads(children(make_job(model=HUB, actors={"podTemplate": overlay}), settings))
    assert len(found) == 5
    for role, template in found.items():
        names = {secret["name"] for secret in template["spec"]["imagePullSecrets"]}
        assert names == ({"mirror", "own"} if role == "actor" else {"mirror"}), role


def test_the_priority_class_reaches_every_pod() -> None:
    for template in workloads(children(make_job(model=HUB, scheduling={"priorityClassName": "research"}))).values():
        assert template["spec"]["priorityClassName"] == "research"


@pytest.mark.parametrize("stop_s", [60, 900])
def test_pods_live_long_enough_to_end_in_order(stop_s: int) -> None:
    everything = children(make_job(checkpoint={"stopSeconds": stop_s}))
    grace = {
        role: template["spec"]["terminationGracePeriodSeconds"] for role, template in workloads(everything).items()
    }
    workers = int(environment(workloads(everything)["trainer"], "trainer")["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert grace["trainer"] > workers > stop_s
    assert all(grace[role] > launch.GRACE_S for role in ("coordinator", "inference", "actor"))


@pytest.mark.parametrize("role", ["coordinator", "inference", "actor"])
def test_probes_need_no_token_and_start_up_has_its_budget(role: str) -> None:
    container = container_of(workloads(children(make_job()))[role], role)
    paths = {probe: container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    ports = {port["name"] for port in container["ports"]}
    assert container["readinessProbe"]["httpGet"]["port"] in ports
    startup = container["startupProbe"]
    budget = getattr(SETTINGS, f"{role}_startup_s")
    assert budget <= startup["periodSeconds"] * startup["failureThreshold"] < budget + startup["periodSeconds"]


# --- coordinator, servers, actors -------------------------------------------------------------------------------------


def test_the_others_find_the_coordinator_by_its_service() -> None:
    found = children(make_job())
    service = find(found, "Service", "letters-coordinator")
    (port,) = service["spec"]["ports"]
    for role in ("inference", "actor", "trainer"):
        assert config_of(found, role).coordinator_url == f"http://letters-coordinator:{port['port']}"
    assert config_of(found, "coordinator").port == port["port"]
    assert config_of(found, "coordinator").host == "0.0.0.0"


def test_every_server_has_a_name_before_it_is_ready_and_people_meet_only_ready_ones() -> None:
    found = children(make_job())
    pods, front = find(found, "Service", "letters-inference-pods"), find(found, "Service", "letters-inference")
    assert pods["spec"]["clusterIP"] == "None"
    assert pods["spec"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in front["spec"]
    servers = find(found, "StatefulSet", "letters-inference")
    assert servers["spec"]["serviceName"] == "letters-inference-pods"
    assert servers["spec"]["podManagementPolicy"] == "Parallel"
    config = config_of(found, "inference")
    assert config.server_id == "$(INFLIGHT_POD_NAME)"
    assert config.advertise_url == f"http://$(INFLIGHT_POD_NAME).letters-inference-pods:{config.port}"


@pytest.mark.parametrize("role", ["inference", "actor", "trainer"])
def test_a_pod_knows_its_name_and_address(role: str) -> None:
    found = environment(workloads(children(make_job()))[role], role)
    assert found["INFLIGHT_POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert found["INFLIGHT_POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}


@pytest.mark.parametrize(
    ("inference", "gpus", "device"),
    [
        ({}, None, "cpu"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "1", "cuda"),
        ({"resources": {"requests": {"nvidia.com/gpu": 1}}}, "1", "cuda"),
        ({"tensorParallel": 4}, "4", "cuda"),
        ({"tensorParallel": 4, "resources": {"limits": {"nvidia.com/gpu": 8}}}, "8", "cuda"),
        (
            {
                "podTemplate": {
                    "spec": {"containers": [{"name": "inference", "resources": {"limits": {"nvidia.com/gpu": 2}}}]}
                }
            },
            "2",
            "cuda",
        ),
    ],
)
def test_a_server_has_the_gpus_of_its_job_and_computes_on_them(
    inference: dict[str, Any], gpus: str | None, device: str
) -> None:
    found = children(make_job(inference=inference))
    resources = container_of(workloads(found)["inference"], "inference")["resources"]
    got = resources["limits"].get("nvidia.com/gpu")
    assert (None if got is None else str(got)) == gpus
    assert config_of(found, "inference").device == device
    assert config_of(found, "trainer").device == "cpu"


def test_servers_and_trainer_may_compute_on_different_devices() -> None:
    found = children(make_job(trainer={"resources": {"limits": {"nvidia.com/gpu": 1, "cpu": 12}}}))
    assert (config_of(found, "inference").device, config_of(found, "trainer").device) == ("cpu", "cuda")
    assert config_of(found, "trainer").threads == 12
    assert environment(workloads(found)["trainer"], "trainer")["OMP_NUM_THREADS"] == "12"


# --- trainer ----------------------------------------------------------------------------------------------------------


def test_the_ranks_of_all_nodes_meet_at_the_first_node() -> None:
    found = children(on_nodes(make_job(), 4, 8))
    job = find(found, "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)
    env = environment(template_of(find(found, "JobSet")), "trainer")
    assert (env["PET_NNODES"], env["PET_NPROC_PER_NODE"]) == ("4", "8")
    assert env["PET_MASTER_ADDR"] == "letters-t-n-0-0.letters-t"
    assert env["PET_NODE_RANK"]["fieldRef"]["fieldPath"].endswith("['batch.kubernetes.io/job-completion-index']")
    command = container_of(template_of(find(found, "JobSet")), "trainer")["command"]
    assert command[:4] == ["python", "-m", "inflight_runtime.trainer.launch", "--config"]


def test_a_trainer_of_one_node_needs_no_name() -> None:
    env = environment(workloads(children(make_job()))["trainer"], "trainer")
    assert (env["PET_NNODES"], env["PET_MASTER_ADDR"]) == ("1", "127.0.0.1")


def test_a_failed_node_restarts_the_trainer_a_drain_costs_no_restart_and_bad_input_gets_none() -> None:
    job_set = find(children(make_job(trainer={"maxRestarts": 2})), "JobSet")["spec"]
    assert job_set["failurePolicy"]["maxRestarts"] == 2
    bad, drained = job_set["failurePolicy"]["rules"]
    assert (bad["action"], bad["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert drained["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert drained["onJobFailureReasons"] == ["PodFailurePolicy"]
    said = {  # by Kubernetes' Job controller
        "bad": "Container trainer for pod a/x-t-n-0-0-2xdsd failed with exit code 2 matching FailJob rule at index 1",
        "drained": "Pod a/x-t-n-0-0-2xdsd has condition DisruptionTarget matching FailJob rule at index 0",
    }
    for rule, name in ((bad, "bad"), (drained, "drained")):
        (pattern,) = rule["onJobFailureMessagePatterns"]
        assert [one for one, words in said.items() if re.search(pattern, words)] == [name]
    job = job_set["replicatedJobs"][0]["template"]["spec"]
    assert (job["backoffLimit"], job["podReplacementPolicy"]) == (0, "Failed")
    on_drain, on_bad = job["podFailurePolicy"]["rules"]
    assert (on_drain["action"], on_drain["onPodConditions"][0]["type"]) == ("FailJob", "DisruptionTarget")
    assert on_bad == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [EXIT_BAD_INPUT]},
    }
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job_set["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}


def test_volatile_things_are_not_in_the_trainers_template() -> None:
    at_start = {"servers_at_start": 1, "actors_at_start": 1}
    one, many = children(make_job()), children(make_job(), inference_replicas=9, actor_replicas=3, **at_start)
    assert find(one, "JobSet") == find(many, "JobSet")


def test_an_overlay_cannot_make_a_trainer_restart_in_place() -> None:
    overlay = {"spec": {"restartPolicy": "OnFailure"}}
    template = workloads(children(make_job(trainer={"podTemplate": overlay})))["trainer"]
    assert template["spec"]["restartPolicy"] == "Never"


# --- storage ----------------------------------------------------------------------------------------------------------


def test_claims_carry_the_run_whose_data_they_hold() -> None:
    found = [child for child in children(make_job(model=HUB)) if child.kind == "PersistentVolumeClaim"]
    assert {claim.name for claim in found} == {"letters-coordinator", "letters-checkpoint", "letters-model"}
    assert {claim.manifest["metadata"]["labels"][names.RUN_UID_LABEL] for claim in found} == {UID}


@pytest.mark.parametrize(("on_delete", "owned"), [("Retain", False), ("Delete", True)])
def test_a_retained_checkpoint_outlives_its_job(on_delete: str, owned: bool) -> None:
    found = children(make_job(checkpoint={"onDelete": on_delete}))
    claim = find(found, "PersistentVolumeClaim", "letters-checkpoint")
    assert ("ownerReferences" in claim["metadata"]) is owned
    assert "ownerReferences" in find(found, "PersistentVolumeClaim", "letters-coordinator")["metadata"]


def test_claims_are_as_the_job_asks_and_else_of_the_installations_class() -> None:
    storage = {"size": "5Gi", "class": "fast", "accessModes": ["ReadWriteMany"]}
    settings = SETTINGS.model_copy(update={"storage_class": "standard"})
    found = children(make_job(checkpoint={"storage": storage}), settings)
    assert find(found, "PersistentVolumeClaim", "letters-checkpoint")["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "5Gi"}},
        "storageClassName": "fast",
    }
    assert find(found, "PersistentVolumeClaim", "letters-coordinator")["spec"]["storageClassName"] == "standard"
    assert "storageClassName" not in find(children(make_job()), "PersistentVolumeClaim", "letters-checkpoint")["spec"]


def test_only_the_trainer_mounts_the_checkpoints_and_only_the_coordinator_its_data() -> None:
    found = children(make_job(checkpoint={"claimName": "shared"}))
    mounted = {
        role: {v["persistentVolumeClaim"]["claimName"] for v in volumes(t).values() if "persistentVolumeClaim" in v}
        for role, t in workloads(found).items()
    }
    assert mounted == {
        "coordinator": {"letters-coordinator"},
        "trainer": {"shared"},
        "inference": set(),
        "actor": set(),
    }
    assert [c.name for c in found if c.kind == "PersistentVolumeClaim"] == ["letters-coordinator"]


def test_runs_that_share_a_claim_do_not_share_a_directory() -> None:
    first = config_of(children(make_job()), "trainer").checkpoint.dir
    second = config_of(children(make_job(), uid="99999999-0000-4000-8000-000000000000"), "trainer").checkpoint.dir
    assert first.as_posix() == "/checkpoints/letters-3f0c5b1e/checkpoints"
    assert first != second


@pytest.mark.parametrize(
    ("given", "expected"),
    [("old-1a2b3c4d/checkpoints", "/checkpoints/old-1a2b3c4d/checkpoints"), ("/seed", "/seed"), (None, None)],
)
def test_a_run_resumes_from_a_directory_of_the_claim_or_of_the_image(given: str | None, expected: str | None) -> None:
    found = config_of(children(make_job(checkpoint={"resumeFrom": given})), "trainer").checkpoint.resume_from
    assert (None if found is None else found.as_posix()) == expected


# --- model and environment --------------------------------------------------------------------------------------------


def test_a_model_in_the_image_is_used_where_it_is() -> None:
    found = children(make_job())
    assert "Job" not in {child.kind for child in found}
    assert config_of(found, "inference").model.path == "./model"
    assert not any(child.waits_for_model for child in found)


def test_a_model_on_a_claim_is_mounted_and_not_written_to() -> None:
    found = children(make_job(model={"source": None, "volume": {"claimName": "models", "subPath": "a/b"}}))
    for role in ("inference", "actor", "trainer"):
        mounts = {mount["name"]: mount for mount in container_of(workloads(found)[role], role)["volumeMounts"]}
        # The whole claim: a directory that somebody puts in place later would not be seen through a subPath.
        assert mounts["model"] == {"name": "model", "mountPath": "/model", "readOnly": True}
        assert config_of(found, role).model.path == config_of(found, role).model.tokenizer == "/model/a/b"
    assert "Job" not in {child.kind for child in found}


def test_a_hub_model_is_fetched_once_and_the_roles_wait_for_it() -> None:
    found = children(make_job(model={**HUB, "revision": "abc", "tokenSecretRef": {"name": "hub", "key": "k"}}))
    assert {child.role for child in found if child.waits_for_model} == {"trainer", "inference", "actor"}
    template = workloads(found)["model"]
    command = container_of(template, "model")["command"]
    assert command[:5] == ["hf", "download", "example-org/model-1b", "--local-dir", "/fetched/model"]
    assert command[5:7] == ["--revision", "abc"]
    assert environment(template, "model")["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "k"}}
    assert "HF_HUB_OFFLINE" not in environment(template, "model")
    for role in ("inference", "actor", "trainer"):
        assert config_of(found, role).model.path == "/fetched/model"
        assert environment(workloads(found)[role], role)["HF_HUB_OFFLINE"] == "1"


def test_a_tokenizer_of_its_own_is_fetched_beside_the_model() -> None:
    found = children(make_job(model={**HUB, "tokenizer": "example-org/tokenizer"}))
    spec = workloads(found)["model"]["spec"]
    commands = [spec["initContainers"][0]["command"], spec["containers"][0]["command"]]
    assert [(command[2], command[4]) for command in commands] == [
        ("example-org/model-1b", "/fetched/model"),
        ("example-org/tokenizer", "/fetched/tokenizer"),
    ]
    assert config_of(found, "actor").model.tokenizer == "/fetched/tokenizer"


def test_the_environments_code_is_a_copy_that_cannot_change() -> None:
    found = children(make_job(environment={"configMap": "capitals"}), code=CODE)
    copy = next(child for child in found if child.role == names.CODE)
    assert copy.manifest["immutable"] is True
    assert copy.manifest["data"] == dict(CODE.data)
    assert copy.manifest["binaryData"] == dict(CODE.binary_data)
    assert volumes(workloads(found)["actor"])["code"]["configMap"]["name"] == copy.name
    assert config_of(found, "actor").environment.search_path == ("/opt/inflight/environment",)
    other = children(make_job(environment={"configMap": "capitals"}))
    assert next(child for child in other if child.role == names.CODE).name != copy.name
    assert not [child for child in children(make_job()) if child.role == names.CODE]


# --- network and disruption -------------------------------------------------------------------------------------------


def test_only_the_run_reaches_its_pods() -> None:
    (policy,) = [child.manifest for child in children(make_job()) if child.kind == "NetworkPolicy"]
    everybody = {"matchLabels": {names.JOB_LABEL: "letters"}}
    assert policy["spec"] == {
        "podSelector": everybody,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": everybody}]}],
    }


def test_the_operator_reaches_the_coordinator_alone_and_monitoring_the_metrics() -> None:
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    settings = SETTINGS.model_copy(update={"operator_namespace": "inflight-system", "scrape_from": peer})
    found = children(make_job(), settings)
    operator = find(found, "NetworkPolicy", "letters-from-operator")["spec"]
    assert operator["podSelector"]["matchLabels"] == names.selector("letters", "coordinator")
    (rule,) = operator["ingress"]
    assert rule["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "inflight-system"}
    assert [port["port"] for port in rule["ports"]] == [7000]
    scrape = find(found, "NetworkPolicy", "letters-from-scrape")["spec"]
    assert scrape["ingress"][0]["from"] == [peer]
    assert [port["port"] for port in scrape["ingress"][0]["ports"]] == [7000, 8000, 7001]


def test_drains_take_one_server_and_one_actor_at_a_time_and_nothing_blocks_them() -> None:
    budgets = [child.manifest for child in children(make_job()) if child.kind == "PodDisruptionBudget"]
    assert {budget["metadata"]["labels"][names.ROLE_LABEL] for budget in budgets} == {"inference", "actor"}
    assert all(budget["spec"]["maxUnavailable"] == 1 for budget in budgets)


# --- overlays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"spec": {"containers": [{"name": "actor", "$patch": "delete"}]}}, "the container actor must stay"),
        ({"spec": {"containers": None}}, "the container actor must stay"),
        ({"spec": {"$patch": "replace"}}, "the container actor must stay"),
        ({"spec": 3}, r"podTemplate\.spec: must be an object"),
        ({"metadata": []}, r"podTemplate\.metadata: must be an object"),
        ({"spec": {"containers": [{"image": "x"}]}}, r"podTemplate\.spec\.containers\[0\]: has no name"),
    ],
)
def test_an_overlay_that_cannot_be_merged_is_refused_with_its_place(overlay: dict[str, Any], message: str) -> None:
    with pytest.raises(MergeError, match=message):
        children(with_overlay("actors", overlay))


def test_an_overlay_may_relax_what_a_pod_defaults_to() -> None:
    container = {"name": "actor", "securityContext": {"readOnlyRootFilesystem": False}}
    overlay = {"spec": {"serviceAccountName": "mine", "containers": [container]}}
    template = workloads(children(make_job(actors={"podTemplate": overlay})))["actor"]
    assert template["spec"]["serviceAccountName"] == "mine"
    assert container_of(template, "actor")["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_building_changes_neither_the_job_nor_its_overlay() -> None:
    job = make_job(actors={"podTemplate": {"spec": {"containers": [{"name": "actor", "env": []}]}}})
    before = job.model_dump_json()
    build_children(job, SETTINGS, Facts("n", UID, "t"))
    assert job.model_dump_json() == before


def test_the_operators_builders_load_neither_torch_nor_an_engine() -> None:
    code = """
import sys
import inflight_operator.builders, inflight_operator.settings
print(sorted({"torch", "vllm", "transformers", "numpy", "aiohttp"} & set(sys.modules)))
print(sorted({name.split(".")[1] for name in sys.modules if name.startswith("inflight_runtime.")}))
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert output.stdout == "[]\n['api', 'config']\n"
