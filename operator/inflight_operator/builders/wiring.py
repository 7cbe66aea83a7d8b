"""What the roles of a job have to know of each other: addresses, the model's place, devices, the rendered configs."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from inflight_operator import names
from inflight_operator.builders.build import Build, digest
from inflight_operator.builders.pods import (
    CHECKPOINT_DIR,
    CODE_DIR,
    DATA_DIR,
    FETCHED_DIR,
    MODEL_DIR,
    TOKEN_DIR,
    TOKEN_KEY,
    Mount,
    claim,
)
from inflight_operator.builders.resources import Requirements, device_of, requirements, threads_of
from inflight_runtime.api import RLTrainingJob
from inflight_runtime.api.rules import looks_like_path
from inflight_runtime.config import pod, roles
from inflight_runtime.config.render import ActorAddress, Addresses, ServerAddress, render_roles

COORDINATOR_PORT: Final = 7000
INFERENCE_PORT: Final = 8000
ACTOR_PORT: Final = 7001
"""Ports of the roles' HTTP routes, their metrics among them."""
ANY_ADDRESS: Final = "0.0.0.0"  # noqa: S104  a pod's own network; NetworkPolicies say who gets in
MODEL_WAIT_S: Final = 600.0
FETCHED_MODEL: Final = f"{FETCHED_DIR}/model"
FETCHED_TOKENIZER: Final = f"{FETCHED_DIR}/tokenizer"


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where the roles find the model.

    Attributes:
        path: of the model in every role's container.
        tokenizer: of its tokenizer.
        fetched: hub id by directory; empty where nothing is fetched.
        mounts: what the containers need for it.
    """

    path: str
    tokenizer: str
    fetched: dict[str, str]
    mounts: tuple[Mount, ...]


@dataclass(frozen=True, slots=True)
class Wiring:
    """Everything the roles' builders share.

    Attributes:
        model: the model's place.
        code: mount of the environment's code, if it comes from a ConfigMap.
        config_map: name of the ConfigMap with the role configs.
        configs: its files.
        inference: resources of a server.
        trainer: resources of a trainer node.
    """

    model: ModelPlace
    code: tuple[Mount, ...]
    config_map: str
    configs: dict[str, str]
    inference: Requirements
    trainer: Requirements


def wire(build: Build) -> Wiring:
    """Resolve what the roles share, and render their configs."""
    spec = build.job.spec
    parallel = spec.inference.tensor_parallel
    gpus = {build.settings.gpu_resource: str(parallel)} if parallel > 1 else None
    inference = requirements(names.INFERENCE, spec.inference, gpus)
    trainer = requirements(names.TRAINER, spec.trainer)
    model = model_place(build)
    code = code_mounts(build)
    addresses = replace(
        pod_addresses(build, model, code),
        device=device_of(inference),
        trainer_device=device_of(trainer),
        server_threads=threads_of(inference),
        trainer_threads=threads_of(trainer, spec.trainer.processes_per_node),
    )
    run = render_roles(_at_start(build), addresses)
    rendered: dict[str, roles.RoleModel] = {
        names.COORDINATOR: run.coordinator,
        names.INFERENCE: run.inference[0],
        names.ACTOR: run.actors[0],
        names.TRAINER: run.trainer,
    }
    configs = {f"{role}.json": config.model_dump_json(indent=2) + "\n" for role, config in rendered.items()}
    return Wiring(model, code, names.config(build.name, digest(configs)), configs, inference, trainer)


def model_place(build: Build) -> ModelPlace:
    """Where the model of a job is: in the image, on a claim of the user's, or fetched from the hub into one of ours."""
    model = build.job.spec.model
    fetched: dict[str, str] = {}
    mounts: tuple[Mount, ...] = ()
    if model.volume is not None:
        # Not mounted by subPath: a directory that is not there yet would be made, and one that is put in its place
        # would never be seen.
        path = posixpath.join(MODEL_DIR, model.volume.sub_path).rstrip("/")
        mounts = (Mount("model", MODEL_DIR, claim(model.volume.claim_name), read_only=True),)
    else:
        path = model.source or "."
        if not looks_like_path(path):
            fetched[FETCHED_MODEL] = path
            path = FETCHED_MODEL
    tokenizer = model.tokenizer or path
    if model.tokenizer is not None and not looks_like_path(tokenizer):
        fetched[FETCHED_TOKENIZER] = tokenizer
        tokenizer = FETCHED_TOKENIZER
    if fetched:
        mounts = (*mounts, Mount("fetched", FETCHED_DIR, claim(names.model(build.name)), read_only=True))
    return ModelPlace(path, tokenizer, fetched, mounts)


def run_directory(build: Build) -> str:
    """Directory of the run on the checkpoint claim, which several runs may share; laid out as on one machine."""
    return f"{CHECKPOINT_DIR}/{build.name}-{build.facts.uid[:8]}"


def code_mounts(build: Build) -> tuple[Mount, ...]:
    """The environment's code, from the job's own copy of the user's ConfigMap."""
    if build.job.spec.environment.config_map is None:
        return ()
    source = {"configMap": {"name": names.code(build.name, code_digest(build))}}
    return (Mount("code", CODE_DIR, source, read_only=True),)


def code_digest(build: Build) -> str:
    """Digest of the environment's files."""
    code = build.facts.code
    return digest([dict(code.data), dict(code.binary_data)])


def pod_addresses(build: Build, model: ModelPlace, code: tuple[Mount, ...]) -> Addresses:
    """The places of a run in a cluster; what only a pod knows is left to it (:mod:`inflight_runtime.config.pod`)."""
    name, run = build.name, run_directory(build)
    resume_from = build.job.spec.checkpoint.resume_from
    return Addresses(
        coordinator_host=ANY_ADDRESS,
        coordinator_port=COORDINATOR_PORT,
        coordinator_url=f"http://{names.coordinator(name)}:{COORDINATOR_PORT}",
        # Below the root of the volume, where some file systems keep a directory of their own.
        data_dir=Path(DATA_DIR) / "run",
        token_file=Path(TOKEN_DIR) / TOKEN_KEY,
        servers=(
            ServerAddress(
                pod.NAME,
                ANY_ADDRESS,
                INFERENCE_PORT,
                f"http://{pod.NAME}.{names.inference_pods(name)}:{INFERENCE_PORT}",
            ),
        ),
        actors=(ActorAddress(pod.NAME, ANY_ADDRESS, ACTOR_PORT),),
        trainer_host=pod.ADDRESS,
        model_path=model.path,
        tokenizer_path=model.tokenizer,
        model=None,
        # Applied together with the job, what fills a claim may take longer than a role's start.
        model_wait_s=MODEL_WAIT_S if build.job.spec.model.volume is not None else 0.0,
        checkpoint_dir=Path(run) / "checkpoints",
        log_dir=Path(run),
        resume_from=None if resume_from is None else Path(posixpath.join(CHECKPOINT_DIR, resume_from)),
        search_path=tuple(mount.path for mount in code),
    )


def _at_start(build: Build) -> RLTrainingJob:
    """The job with the replicas that it was started with; the rendering counts on them."""
    spec, facts = build.job.spec, build.facts
    servers = build.servers if facts.servers_at_start is None else facts.servers_at_start
    actors_ = build.actors if facts.actors_at_start is None else facts.actors_at_start
    inference = spec.inference.model_copy(update={"replicas": servers})
    actors = spec.actors.model_copy(update={"replicas": actors_})
    return build.job.model_copy(update={"spec": spec.model_copy(update={"inference": inference, "actors": actors})})
