"""From a job's spec to the config file of every role's process.

:func:`render_roles` is pure and serves a pod and a local process alike: what differs between them stands in its
``Addresses``. :func:`render_local` fills these in for one machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from inflight_runtime.api import RLTrainingJob
from inflight_runtime.config import pod, roles
from inflight_runtime.config.model_files import ModelFacts, read_model_facts
from inflight_runtime.config.sizes import default_micro_batch_tokens, kv_cache_bytes

Device = Literal["cpu", "cuda"]

LOCAL_LEASE_TTL_S: Final = 20.0
LOCAL_MEMBER_TTL_S: Final = 5.0
"""On one machine a silent process is a dead one, so that its work is given to another one sooner than in a cluster."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where one inference server listens, and under which URL the others reach it."""

    server_id: str
    host: str
    port: int
    url: str


@dataclass(frozen=True, slots=True)
class ActorAddress:
    """One actor, and the port of its health routes (0: none)."""

    actor_id: str
    host: str = "127.0.0.1"
    health_port: int = 0


@dataclass(frozen=True, slots=True)
class Addresses:
    """What a spec does not say and a place decides: addresses, paths, devices.

    Attributes:
        coordinator_host: address the coordinator binds to.
        coordinator_port: its port.
        coordinator_url: URL under which the other roles reach it.
        data_dir: directory of the ledger and the payloads.
        token_file: file with the job's bearer token.
        servers: by ordinal.
        actors: by ordinal.
        trainer_host: address under which servers reach the trainer's rendezvous.
        model_path: the model's directory on the roles' disks.
        tokenizer_path: the tokenizer's directory.
        model: facts read from the model's config; ``None`` leaves them to the pod (see :mod:`.pod`).
        model_wait_s: how long the model's files may still be on their way when a role starts.
        checkpoint_dir: where checkpoints go.
        log_dir: where metrics and rollouts go.
        resume_from: checkpoint directory of another run, resolved.
        search_path: directories put in front of ``sys.path`` for the environment.
        device: what servers and trainer compute on.
        trainer_device: what the trainer computes on where that is something else.
        server_threads: CPU threads of a server.
        trainer_threads: CPU threads of the trainer.
        lease_ttl_s: seconds without a heartbeat after which a lease is given to somebody else.
        member_ttl_s: seconds without a heartbeat after which a server is evicted.
    """

    coordinator_host: str
    coordinator_port: int
    coordinator_url: str
    data_dir: Path
    token_file: Path
    servers: tuple[ServerAddress, ...]
    actors: tuple[ActorAddress, ...]
    trainer_host: str
    model_path: str
    tokenizer_path: str
    model: ModelFacts | None
    checkpoint_dir: Path
    log_dir: Path
    resume_from: Path | None = None
    model_wait_s: float = 0.0
    search_path: tuple[str, ...] = ()
    device: Device = "cpu"
    trainer_device: Device | None = None
    server_threads: int = 1
    trainer_threads: int = 1
    lease_ttl_s: float = 60.0
    member_ttl_s: float = 10.0


@dataclass(frozen=True, slots=True)
class LocalLayout:
    """What the local executor decides before a job can be rendered.

    Attributes:
        job_dir: directory of the job file: relative paths and the environment's module are looked for here.
        token_file: file with the run's bearer token.
        coordinator_port: a free port.
        server_ports: one free port per server, :func:`server_count` of them.
        actor_health_ports: one per actor or none at all.
        host: address everything binds to.
        device: ``cuda`` when torch sees an accelerator.
        server_threads: CPU threads of a server.
        trainer_threads: CPU threads of the trainer.
    """

    job_dir: Path
    token_file: Path
    coordinator_port: int
    server_ports: Sequence[int]
    actor_health_ports: Sequence[int] = ()
    host: str = "127.0.0.1"
    device: Device = "cpu"
    server_threads: int = 1
    trainer_threads: int = 1


@dataclass(frozen=True, slots=True)
class RenderedRun:
    """The configs of all processes of one run."""

    coordinator: roles.CoordinatorConfig
    inference: tuple[roles.InferenceConfig, ...]
    actors: tuple[roles.ActorConfig, ...]
    trainer: roles.TrainerConfig


def server_count(job: RLTrainingJob) -> int:
    """Inference servers to start with."""
    replicas = job.spec.inference.replicas
    return 1 if replicas is None else replicas


def actor_count(job: RLTrainingJob) -> int:
    """Actors to start with."""
    replicas = job.spec.actors.replicas
    return 1 if replicas is None else replicas


def resolve_path(job_dir: Path, path: str) -> Path:
    """A path of a job file as an absolute one; relative ones start at the job file's directory."""
    # normpath, not resolve: a link that the user set up stays what the messages name.
    return Path(os.path.normpath(job_dir.absolute() / path))


def longest_sequence(job: RLTrainingJob, facts: ModelFacts) -> int:
    """Tokens of prompt and answer together: the model's bound, or ``max-model-len`` where that is less."""
    wanted = job.spec.inference.engine_args.get("max-model-len")
    return min(facts.max_length, wanted) if isinstance(wanted, int) else facts.max_length


def micro_batch_tokens(job: RLTrainingJob, max_length: int) -> int:
    """Token budget of a micro-batch: as given, else 8192 or the longest sequence if that is more.

    A sequence cannot be cut, so one must fit; a group that is longer than the budget is split over rows.
    """
    given = job.spec.trainer.micro_batch_tokens
    return default_micro_batch_tokens(max_length) if given is None else given


def actor_concurrency(job: RLTrainingJob) -> int:
    """Groups in flight in one actor: as given, else enough in all actors together to keep the servers full.

    That is ``ceil(servers * maxConcurrent / groupSize)``, no more than admission lets out, over the actors.
    """
    given = job.spec.actors.concurrency
    if given is not None:
        return given
    algorithm = job.spec.algorithm
    full = math.ceil(server_count(job) * job.spec.inference.max_concurrent / algorithm.group_size)
    admitted = (algorithm.max_staleness + 1) * algorithm.prompts_per_step
    return max(1, math.ceil(min(full, admitted) / max(1, actor_count(job))))


def server_dtype(job: RLTrainingJob, device: Device) -> roles.Dtype:
    """What servers on this device compute in: as given, else bfloat16 on a GPU and float32 on a CPU."""
    given = job.spec.model.dtype
    if given != "auto":
        return given
    return "bfloat16" if device == "cuda" else "float32"


def trainer_dtype(job: RLTrainingJob, device: Device, servers: roles.Dtype) -> roles.Dtype:
    """What a trainer on this device computes in: as given, else as the servers on a GPU and in float32 on a CPU."""
    given = job.spec.trainer.precision
    if given != "auto":
        return given
    return servers if device == "cuda" else "float32"


def cpu_kv_cache_bytes(job: RLTrainingJob, facts: ModelFacts, dtype: roles.Dtype) -> int:
    """KV cache of a CPU server, in bytes (see :func:`.sizes.kv_cache_bytes`)."""
    return kv_cache_bytes(facts, dtype, longest_sequence(job, facts), job.spec.inference.max_concurrent)


def render_roles(job: RLTrainingJob, addresses: Addresses) -> RenderedRun:
    """Render the configs of all roles. Pure.

    Args:
        job: a checked job.
        addresses: where everything is.
    """
    return RenderedRun(
        coordinator=_coordinator(job, addresses),
        inference=tuple(_inference(job, addresses, ordinal) for ordinal in range(len(addresses.servers))),
        actors=tuple(_actor(job, addresses, actor) for actor in addresses.actors),
        trainer=_trainer(job, addresses),
    )


def render_local(job: RLTrainingJob, run_dir: Path, layout: LocalLayout) -> RenderedRun:
    """Render a run on this machine.

    Args:
        job: a checked job, with ``spec.model.source`` naming a directory.
        run_dir: the run's directory; gets ``coordinator/`` (ledger), ``checkpoints/`` and, at its top, metrics and
            rollouts.
        layout: ports, the job file's directory, the device.

    Raises:
        JobError: the model's config.json cannot be used (``checks.check_local_run`` says more).
        ValueError: ``layout`` has not a port for every server.
    """
    servers, actors = server_count(job), actor_count(job)
    if len(layout.server_ports) != servers or len(layout.actor_health_ports) not in (0, actors):
        raise ValueError(f"{servers} servers and {actors} actors do not fit the ports of {layout}")
    run_dir = run_dir.absolute()
    model_path = resolve_path(layout.job_dir, job.spec.model.source or ".")
    tokenizer = job.spec.model.tokenizer
    tokenizer_path = model_path if tokenizer is None else resolve_path(layout.job_dir, tokenizer)
    resume_from = job.spec.checkpoint.resume_from
    health_ports = layout.actor_health_ports or [0] * actors
    addresses = Addresses(
        coordinator_host=layout.host,
        coordinator_port=layout.coordinator_port,
        coordinator_url=f"http://{layout.host}:{layout.coordinator_port}",
        data_dir=run_dir / "coordinator",
        token_file=layout.token_file.absolute(),
        servers=tuple(
            ServerAddress(f"inference-{ordinal}", layout.host, port, f"http://{layout.host}:{port}")
            for ordinal, port in enumerate(layout.server_ports)
        ),
        actors=tuple(ActorAddress(f"actor-{number}", layout.host, port) for number, port in enumerate(health_ports)),
        trainer_host=layout.host,
        model_path=str(model_path),
        tokenizer_path=str(tokenizer_path),
        model=read_model_facts(model_path, tokenizer_path),
        checkpoint_dir=run_dir / "checkpoints",
        log_dir=run_dir,
        resume_from=None if resume_from is None else resolve_path(layout.job_dir, resume_from),
        search_path=(str(layout.job_dir.absolute()),),
        device=layout.device,
        server_threads=layout.server_threads,
        trainer_threads=layout.trainer_threads,
        lease_ttl_s=LOCAL_LEASE_TTL_S,
        member_ttl_s=LOCAL_MEMBER_TTL_S,
    )
    return render_roles(job, addresses)


def write_role_configs(rendered: RenderedRun, directory: Path) -> dict[str, Path]:
    """Write one JSON file per process: ``coordinator.json``, ``inference-0.json``, ``actor-0.json``, ``trainer.json``.

    Returns:
        The files by process name (the file name without ``.json``).

    Raises:
        OSError: they cannot be written.
    """
    configs: dict[str, roles.RoleModel] = {"coordinator": rendered.coordinator}
    configs |= {config.server_id: config for config in rendered.inference}
    configs |= {config.actor_id: config for config in rendered.actors}
    configs["trainer"] = rendered.trainer
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, Path] = {}
    for name, config in configs.items():
        files[name] = directory / f"{name}.json"
        files[name].write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return files


def _model_files(job: RLTrainingJob, addresses: Addresses, dtype: roles.Dtype) -> roles.ModelFiles:
    return roles.ModelFiles(
        path=addresses.model_path,
        tokenizer=addresses.tokenizer_path,
        dtype=dtype,
        trust_remote_code=job.spec.model.trust_remote_code,
        max_length=_max_length(job, addresses),
        wait_s=addresses.model_wait_s,
    )


def _max_length(job: RLTrainingJob, addresses: Addresses) -> int:
    if addresses.model is not None:
        return longest_sequence(job, addresses.model)
    wanted = job.spec.inference.engine_args.get("max-model-len")
    return wanted if isinstance(wanted, int) else pod.FROM_MODEL


def _coordinator(job: RLTrainingJob, addresses: Addresses) -> roles.CoordinatorConfig:
    algorithm, evaluation = job.spec.algorithm, job.spec.evaluation
    return roles.CoordinatorConfig(
        job=job.name,
        host=addresses.coordinator_host,
        port=addresses.coordinator_port,
        data_dir=addresses.data_dir,
        token_file=addresses.token_file,
        steps=algorithm.steps,
        groups_per_step=algorithm.prompts_per_step,
        group_size=algorithm.group_size,
        max_staleness=algorithm.max_staleness,
        over_age=algorithm.over_age,
        zero_variance=algorithm.zero_variance,
        lease_ttl_s=addresses.lease_ttl_s,
        member_ttl_s=addresses.member_ttl_s,
        shuffle=algorithm.shuffle,
        seed=algorithm.seed,
        evaluation=None
        if evaluation is None
        else roles.Evaluation(
            every_steps=evaluation.every_steps, prompts=evaluation.prompts, attempts=evaluation.attempts
        ),
    )


def _inference(job: RLTrainingJob, addresses: Addresses, ordinal: int) -> roles.InferenceConfig:
    inference, server = job.spec.inference, addresses.servers[ordinal]
    dtype = server_dtype(job, addresses.device)
    facts = addresses.model
    return roles.InferenceConfig(
        job=job.name,
        server_id=server.server_id,
        engine=inference.engine,
        host=server.host,
        port=server.port,
        advertise_url=server.url,
        coordinator_url=addresses.coordinator_url,
        token_file=addresses.token_file,
        model=_model_files(job, addresses, dtype),
        served_name=job.name,
        kv_cache=job.spec.weight_sync.kv_cache,
        max_concurrent=inference.max_concurrent,
        tensor_parallel=inference.tensor_parallel,
        device=addresses.device,
        cpu_kv_cache_bytes=pod.FROM_MODEL if facts is None else cpu_kv_cache_bytes(job, facts, dtype),
        threads=addresses.server_threads,
        update_deadline_s=job.spec.weight_sync.deadline_seconds,
        # Servers draw from seeds of their own, so that two of them never give the same answers to one prompt.
        seed=job.spec.algorithm.seed + ordinal,
        engine_args={name: value for name, value in inference.engine_args.items() if name != "max-model-len"},
    )


def _actor(job: RLTrainingJob, addresses: Addresses, actor: ActorAddress) -> roles.ActorConfig:
    environment = job.spec.environment
    return roles.ActorConfig(
        job=job.name,
        actor_id=actor.actor_id,
        host=actor.host,
        health_port=actor.health_port,
        coordinator_url=addresses.coordinator_url,
        token_file=addresses.token_file,
        model=_model_files(job, addresses, server_dtype(job, addresses.device)),
        served_name=job.name,
        environment=environment_spec(job, addresses.search_path),
        sampling=roles.Sampling(
            temperature=job.spec.sampling.temperature,
            max_tokens=job.spec.sampling.max_tokens,
            stop=tuple(job.spec.sampling.stop),
            seed=job.spec.algorithm.seed,
        ),
        group_size=job.spec.algorithm.group_size,
        concurrency=actor_concurrency(job),
        request_timeout_s=environment.rollout_timeout_seconds,
        # The same in all actors: which of them plays a group must not change its outcome.
        seed=job.spec.algorithm.seed,
    )


def environment_spec(job: RLTrainingJob, search_path: Sequence[str]) -> roles.EnvironmentSpec:
    """The environment as the actor loads it."""
    environment = job.spec.environment
    return roles.EnvironmentSpec(
        entrypoint=environment.entrypoint,
        args=environment.args,
        search_path=tuple(search_path),
        rollout_timeout_s=environment.rollout_timeout_seconds,
        reward_timeout_s=environment.reward_timeout_seconds,
        attempt_retries=environment.attempt_retries,
        max_consecutive_failures=environment.max_consecutive_failures,
        overlong_prompt=environment.overlong_prompt,
    )


def _trainer(job: RLTrainingJob, addresses: Addresses) -> roles.TrainerConfig:
    algorithm, trainer, optimizer = job.spec.algorithm, job.spec.trainer, job.spec.trainer.optimizer
    loss, checkpoint, sync = algorithm.loss, job.spec.checkpoint, job.spec.weight_sync
    device, servers = addresses.trainer_device or addresses.device, server_dtype(job, addresses.device)
    model = _model_files(job, addresses, trainer_dtype(job, device, servers))
    unknown = trainer.micro_batch_tokens is None and model.max_length == pod.FROM_MODEL
    clips = {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
    return roles.TrainerConfig(
        job=job.name,
        coordinator_url=addresses.coordinator_url,
        token_file=addresses.token_file,
        model=model,
        engine=trainer.engine,
        zero_stage=trainer.zero_stage,
        offload_optimizer=trainer.offload_optimizer,
        activation_checkpointing=trainer.activation_checkpointing,
        device=device,
        threads=addresses.trainer_threads,
        steps=algorithm.steps,
        groups_per_step=algorithm.prompts_per_step,
        group_size=algorithm.group_size,
        max_staleness=algorithm.max_staleness,
        over_age=algorithm.over_age,
        temperature=job.spec.sampling.temperature,
        max_tokens=job.spec.sampling.max_tokens,
        micro_batch_tokens=pod.FROM_MODEL if unknown else micro_batch_tokens(job, model.max_length),
        loss=roles.LossConfig(
            kind=loss.kind,
            is_cap=loss.is_cap or None,
            entropy_bonus=loss.entropy_bonus,
            normalization=loss.normalization,
            **{name: value for name, value in clips.items() if value is not None},
        ),
        advantage=roles.AdvantageConfig(
            baseline=algorithm.advantage.baseline, divide_by_std=algorithm.advantage.divide_by_std
        ),
        optimizer=roles.OptimizerConfig(
            learning_rate=optimizer.learning_rate,
            betas=(optimizer.betas[0], optimizer.betas[1]),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            grad_clip_norm=optimizer.grad_clip_norm or None,
            schedule=optimizer.schedule,
            warmup_steps=optimizer.warmup_steps,
        ),
        weight_sync=roles.WeightSyncConfig(
            transport=sync.transport,
            interval_steps=sync.interval_steps,
            deadline_s=sync.deadline_seconds,
            bind_host=addresses.trainer_host,
            dtype=servers,
        ),
        checkpoint=roles.CheckpointConfig(
            dir=addresses.checkpoint_dir,
            every_steps=checkpoint.every_steps,
            keep=checkpoint.keep,
            stop_s=checkpoint.stop_seconds,
            resume_from=addresses.resume_from,
        ),
        log_dir=addresses.log_dir,
        rollouts_per_step=job.spec.logging.rollouts_per_step,
        seed=algorithm.seed,
    )
