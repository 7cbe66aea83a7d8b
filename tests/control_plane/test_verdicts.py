"""``inflight validate`` and a real API server give the same verdict on a job; what may change while a job runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from control_plane.cluster import Cluster, KubectlError
from inflight_operator.crd import GROUP, PLURAL, VERSION
from inflight_operator.validation import ROLES, STRUCTURED, SWITCHES, all_rules, flag_of, refused_engine_args
from inflight_runtime.api import JobError, RLTrainingJob, load_job, parse_job, validate_job
from inflight_runtime.api.errors import inner_model
from inflight_runtime.api.loading import dump_yaml, read_yaml
from support.bad_jobs import BAD_JOBS, ENGINE, GOOD, VALID_NEIGHBOURS, Bad, changed, merge

STRICT = {"dry_run": "All", "field_validation": "Strict"}
FROZEN = "cannot change while the job runs; set spec.suspend: true first, and false again with the change"


@dataclass(frozen=True)
class Refusal:
    """What the API server said.

    Attributes:
        message: all of it.
        causes: field and message of each thing that is wrong; empty when the job could not even be decoded.
    """

    message: str
    causes: list[tuple[str, str]]


Ask = Callable[..., Refusal | None]


def refusal_of(error: client.ApiException) -> Refusal:
    status = json.loads(error.body)
    assert status["code"] in (400, 422), status
    causes = (status.get("details") or {}).get("causes") or []
    return Refusal(status["message"], [(cause.get("field", ""), cause["message"]) for cause in causes])


@pytest.fixture(scope="module")
def jobs(cluster: Cluster) -> Iterator[str]:
    """A namespace for all tests of this module: hardly one of them writes anything."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture(scope="module")
def create(admin: client.ApiClient, jobs: str) -> Ask:
    """Asks the API server whether it would create a job; ``None`` when it would."""

    def ask(job: Any) -> Refusal | None:
        try:
            client.CustomObjectsApi(admin).create_namespaced_custom_object(GROUP, VERSION, jobs, PLURAL, job, **STRICT)
        except client.ApiException as error:
            return refusal_of(error)
        return None

    return ask


# --- one verdict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [bad for bad in BAD_JOBS if not bad.unknowable], ids=str)
def test_what_validate_refuses_is_refused_at_admission(create: Ask, bad: Bad) -> None:
    with pytest.raises(JobError):
        validate_job(bad.job, "job.yaml")
    refusal = create(bad.job)
    assert refusal is not None
    if refusal.causes:
        told = [message for field, message in refusal.causes if field == (bad.at or bad.field)]
        assert any(bad.told in message for message in told), refusal.causes
    else:
        assert bad.told in refusal.message
        assert bad.at == "-" or (bad.at or bad.field) in refusal.message


@pytest.mark.parametrize("bad", [bad for bad in BAD_JOBS if bad.unknowable], ids=str)
def test_what_only_validate_and_the_operator_can_know_is_accepted_at_admission(create: Ask, bad: Bad) -> None:
    with pytest.raises(JobError):
        validate_job(bad.job, "job.yaml")
    assert create(bad.job) is None


@pytest.mark.parametrize("change", VALID_NEIGHBOURS)
def test_a_valid_neighbour_is_accepted_by_both(create: Ask, change: str) -> None:
    validate_job(changed(change), "job.yaml")
    assert create(changed(change)) is None


def test_the_table_reaches_every_rule_and_each_refusal_ends_with_its_remedy(create: Ask) -> None:
    refusals = [create(bad.job) for bad in BAD_JOBS if not bad.unknowable]
    assert len(refusals) >= 60
    told = {message for refusal in refusals if refusal is not None for _, message in refusal.causes}
    for rule in all_rules():
        if not rule.at.startswith(f"{ENGINE}."):  # one rule for each name, see below
            assert any(message.endswith(rule.message.partition("; ")[2]) for message in told), rule


def test_every_engine_flag_of_the_run_is_refused_in_its_usual_spellings(create: Ask) -> None:
    for spelling, message in refused_engine_args().items():
        flag = flag_of(spelling)
        value: Any = True if flag in SWITCHES else {"a": 1} if flag in STRUCTURED else "x"
        job = merge(GOOD, {"spec": {"inference": {"engineArgs": {spelling: value}}}})
        refusal = create(job)
        assert refusal is not None, spelling
        ((field, told),) = refusal.causes
        assert field == f"{ENGINE}.{spelling}"
        assert told.endswith(message.partition("; ")[2])
        with pytest.raises(JobError):
            validate_job(job, "job.yaml")


def test_a_wrong_job_is_refused_by_kubectl_with_field_value_and_remedy(
    cluster: Cluster, jobs: str, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(dump_yaml(changed("spec: {sampling: {topP: 0.9}, trainer: {nodes: 2}}")))
    with pytest.raises(KubectlError) as refused:
        cluster.kubectl("apply", "-n", jobs, "-f", str(file))
    for words in ("spec.sampling.topP", "(got 0.9); remove topP", "spec.trainer.nodes", "(got 2); set it to 1"):
        assert words in refused.value.stderr


# --- YAML as kubectl reads it -----------------------------------------------------------------------------------------

RATES = ["1e-6", "1E-6", "1.0e-06", ".000001", "0.000001", "+1e-6", "1_0e-7"]
NO_RATES = ["'1e-6'", '"1e-6"', "1e", "!!str 1e-6", "1e-6 x", "on"]
SCALARS = [
    *("1e-6", "1e6", "1.5e3", "-.5", "1.", "+1", "-0", "0.1", "9007199254740993", "1e+", "e1", "1E5", ".", "+."),
    *("0x1f", "0X1F", "-0x1f", "0o17", "017", "-017", "08", "00", "0b11", "-0B11", "0o8", "0x", "0b"),
    *("1_000", "1_", "_1", "1__0", "0_7", "0x_1f", "1_0.5", "1e5_0", "._5", "1:30", "1:30:15", "190:20:30"),
    *("true", "True", "TRUE", "yes", "Yes", "no", "on", "off", "y", "n", "Y", "N", "tRue"),
    *("null", "~", "Null", "none", "2026-01-31", "2026-01-31T10:00:00Z", "=", "<<", "<<x", "nan", "inf"),
    *("'1e-6'", '"yes"', "''", "a b", "ж", '"\\u00e9"', "'it''s'", "1,000", "!!str 1"),
]


def file_of(tmp_path: Path, rate: str) -> Path:
    job = copy.deepcopy(GOOD)
    job["spec"]["trainer"] = {"optimizer": {"learningRate": "RATE"}}
    file = tmp_path / "job.yaml"
    file.write_text(dump_yaml(job).replace("RATE", rate))
    return file


@pytest.mark.parametrize("rate", RATES)
def test_a_learning_rate_is_the_same_number_to_both(cluster: Cluster, jobs: str, tmp_path: Path, rate: str) -> None:
    file = file_of(tmp_path, rate)
    applied = json.loads(cluster.kubectl("apply", "-n", jobs, "-f", str(file), "--dry-run=server", "-o", "json"))
    assert applied["spec"]["trainer"]["optimizer"]["learningRate"] == 1e-6
    assert load_job(file).spec.trainer.optimizer.learning_rate == 1e-6


@pytest.mark.parametrize("rate", NO_RATES)
def test_what_is_no_learning_rate_is_refused_by_both(cluster: Cluster, jobs: str, tmp_path: Path, rate: str) -> None:
    file = file_of(tmp_path, rate)
    with pytest.raises(KubectlError, match=r"spec\.trainer\.optimizer\.learningRate"):
        cluster.kubectl("apply", "-n", jobs, "-f", str(file), "--dry-run=server")
    with pytest.raises(JobError, match=r"spec\.trainer\.optimizer\.learningRate"):
        load_job(file)


def test_every_scalar_is_read_as_kubectl_reads_it(cluster: Cluster, jobs: str) -> None:
    job = copy.deepcopy(GOOD)
    job["spec"]["environment"]["args"] = {f"s{number}": "" for number in range(len(SCALARS))}
    text = dump_yaml(job)
    for number, scalar in enumerate(SCALARS):
        text = text.replace(f"s{number}: ''", f"s{number}: {scalar}")
    created = json.loads(cluster.kubectl("create", "-n", jobs, "-f", "-", "--dry-run=server", "-o", "json", stdin=text))
    theirs = created["spec"]["environment"]["args"]
    ours = parse_job(text, "job.yaml").spec.environment.args
    for number, scalar in enumerate(SCALARS):
        mine, kubectls = ours[f"s{number}"], theirs[f"s{number}"]
        assert mine == kubectls, scalar
        assert isinstance(mine, bool) == isinstance(kubectls, bool), scalar


def test_a_whole_number_with_a_point_is_refused_where_kubectl_drops_the_point(cluster: Cluster, jobs: str) -> None:
    text = dump_yaml(GOOD).replace("    steps: 100\n", "    steps: 1e2\n")
    with pytest.raises(JobError, match="write 100"):
        parse_job(text, "job.yaml")
    applied = cluster.kubectl("apply", "-n", jobs, "-f", "-", "--dry-run=server", "-o", "json", stdin=text)
    assert json.loads(applied)["spec"]["algorithm"]["steps"] == 100


@pytest.mark.parametrize(
    ("command", "norm"), [(["create"], None), (["apply", "--server-side"], None), (["apply"], 1)], ids=str
)
def test_a_null_that_means_something_is_kept_but_for_client_side_apply(
    cluster: Cluster, jobs: str, command: list[str], norm: int | None
) -> None:
    """Client-side apply sends no nulls, so that there ``gradClipNorm: null`` is the default and not "no clipping"."""
    text = dump_yaml(changed("spec: {trainer: {optimizer: {gradClipNorm: null}}, algorithm: {loss: {isCap: null}}}"))
    assert parse_job(text, "job.yaml").spec.trainer.optimizer.grad_clip_norm is None
    shown = cluster.kubectl(*command, "-n", jobs, "-f", "-", "--dry-run=server", "-o", "json", stdin=text)
    spec = json.loads(shown)["spec"]
    assert spec["trainer"]["optimizer"]["gradClipNorm"] == norm
    assert ("isCap" in spec["algorithm"]["loss"]) == (norm is None)


def test_a_key_given_twice_is_refused_where_kubectl_takes_the_last(cluster: Cluster, jobs: str) -> None:
    text = dump_yaml(GOOD).replace("    steps: 100\n", "    steps: 100\n    steps: 200\n")
    with pytest.raises(JobError, match="given twice"):
        parse_job(text, "job.yaml")
    applied = cluster.kubectl("apply", "-n", jobs, "-f", "-", "--dry-run=server", "-o", "json", stdin=text)
    assert json.loads(applied)["spec"]["algorithm"]["steps"] == 200


# --- what may change --------------------------------------------------------------------------------------------------

FULL = """
spec:
  model: {dtype: float32}
  environment: {args: {words: 3}}
  inference:
    replicas: 2
    engineArgs: {block-size: 32, max-model-len: 64}
    image: example.test/vllm:1
    podTemplate:
      metadata: {labels: {team: a}}
      spec: {nodeSelector: {zone: a}, containers: [{name: inference, env: [{name: A, value: '1'}]}]}
  actors: {replicas: 2, concurrency: 4}
  trainer: {microBatchTokens: 512, optimizer: {gradClipNorm: 0.5}}
  evaluation: {everySteps: 10, prompts: 4}
  checkpoint: {storage: {size: 5Gi}}
"""
"""A job in which most optional fields are given."""

FROZEN_CHANGES = [
    ("spec: {model: {source: ./other}}", "model"),
    ("spec: {model: {dtype: bfloat16}}", "model"),
    ("spec: {environment: {entrypoint: 'other:Environment'}}", "environment"),
    ("spec: {environment: {args: {words: 4}}}", "environment"),
    ("spec: {environment: {args: {more: 1}}}", "environment"),
    ("spec: {environment: {args: null}}", "environment"),
    ("spec: {algorithm: {steps: 200}}", "algorithm"),
    ("spec: {algorithm: {loss: {isCap: 3}}}", "algorithm"),
    ("spec: {algorithm: {promptsPerStep: null}}", "algorithm"),
    ("spec: {sampling: {temperature: 0.5}}", "sampling"),
    ("spec: {sampling: {stop: [END]}}", "sampling"),
    ("spec: {weightSync: {intervalSteps: 2}}", "weightSync"),
    ("spec: {inference: {image: 'example.test/vllm:2'}}", "inference"),
    ("spec: {inference: {image: null}}", "inference"),
    ("spec: {inference: {engineArgs: {block-size: 16}}}", "inference"),
    ("spec: {inference: {engineArgs: {max-model-len: 128}}}", "inference"),
    ("spec: {inference: {engineArgs: null}}", "inference"),
    ("spec: {inference: {podTemplate: {metadata: {labels: {team: b}}}}}", "inference"),
    ("spec: {inference: {podTemplate: {spec: {nodeSelector: {zone: b}}}}}", "inference"),
    (
        "spec: {inference: {podTemplate: {spec: {containers: [{name: inference, env: [{name: A, value: '2'}]}]}}}}",
        "inference",
    ),
    ("spec: {inference: {podTemplate: null}}", "inference"),
    ("spec: {inference: {resources: {limits: {cpu: 2}}}}", "inference"),
    ("spec: {inference: {replicas: 3, maxConcurrent: 32}}", "inference"),
    ("spec: {inference: null}", "inference"),
    ("spec: {actors: {concurrency: 5}}", "actors"),
    ("spec: {actors: {concurrency: null}}", "actors"),
    ("spec: {actors: {podTemplate: {spec: {priority: 1}}}}", "actors"),
    ("spec: {trainer: {optimizer: {learningRate: 0.1}}}", "trainer"),
    ("spec: {trainer: {optimizer: {gradClipNorm: null}}}", "trainer"),
    ("spec: {trainer: {microBatchTokens: null}}", "trainer"),
    ("spec: {trainer: {maxRestarts: 4}}", "trainer"),
    ("spec: {trainer: null}", "trainer"),
    ("spec: {coordinator: {storage: {size: 20Gi}}}", "coordinator"),
    ("spec: {evaluation: {prompts: 5}}", "evaluation"),
    ("spec: {evaluation: null}", "evaluation"),
    ("spec: {checkpoint: {keep: 4}}", "checkpoint"),
    ("spec: {checkpoint: {storage: null}}", "checkpoint"),
    ("spec: {checkpoint: {resumeFrom: /old}}", "checkpoint"),
    ("spec: {scheduling: {priorityClassName: high}}", "scheduling"),
    ("spec: {logging: {rolloutsPerStep: 1}}", "logging"),
    ("spec: {suspend: true, algorithm: {steps: 200}}", "algorithm"),
]

FREE_CHANGES = [
    "spec: {suspend: true}",
    "spec: {inference: {replicas: 3}}",
    "spec: {inference: {replicas: 0}}",
    "spec: {inference: {replicas: null}}",
    "spec: {actors: {replicas: 9}}",
    "spec: {actors: {replicas: null}}",
    "spec: {inference: {replicas: 1}, actors: {replicas: 1}, suspend: true}",
    "spec: {lifecycle: {activeDeadlineSeconds: 60, ttlSecondsAfterFinished: 0, onFailure: delete}}",
    "spec: {lifecycle: null}",
    "metadata: {labels: {team: b}, annotations: {why: not}}",
    "spec: {algorithm: {seed: 0}, scheduling: {}, trainer: {engine: single}}",  # what it is anyway
]


@pytest.fixture(scope="module")
def change(admin: client.ApiClient, jobs: str) -> Ask:
    """Asks the API server whether it would change the job ``running`` or ``suspended``; ``None`` when it would."""
    api = client.CustomObjectsApi(admin)
    for name, suspend in (("running", False), ("suspended", True)):
        job = merge(changed(FULL), {"metadata": {"name": name}, "spec": {"suspend": suspend}})
        api.create_namespaced_custom_object(GROUP, VERSION, jobs, PLURAL, job)

    def ask(name: str, patch: dict[str, Any], **options: Any) -> Refusal | None:
        arguments = {**STRICT, "_content_type": "application/merge-patch+json", **options}
        try:
            api.patch_namespaced_custom_object(GROUP, VERSION, jobs, PLURAL, name, patch, **arguments)
        except client.ApiException as error:
            return refusal_of(error)
        return None

    return ask


def fragment(text: str) -> dict[str, Any]:
    read: dict[str, Any] = read_yaml(text, "fragment")[0]
    return read


@pytest.mark.parametrize(("text", "section"), FROZEN_CHANGES)
def test_a_running_job_keeps_what_its_children_were_made_from(change: Ask, text: str, section: str) -> None:
    refusal = change("running", fragment(text))
    assert refusal is not None
    assert [field for field, _ in refusal.causes] == [f"spec.{section}"]
    assert refusal.causes[0][1].endswith(FROZEN)


@pytest.mark.parametrize("text", [text for text, _ in FROZEN_CHANGES])
@pytest.mark.parametrize("suspend", [True, False], ids=["suspended", "resumed"])
def test_a_suspended_job_may_change_even_as_it_is_resumed(change: Ask, text: str, suspend: bool) -> None:
    assert change("suspended", merge(fragment(text), {"spec": {"suspend": suspend}})) is None


@pytest.mark.parametrize("text", FREE_CHANGES)
@pytest.mark.parametrize("name", ["running", "suspended"])
def test_suspend_replicas_and_lifecycle_change_at_any_time(change: Ask, text: str, name: str) -> None:
    assert change(name, fragment(text)) is None


def test_frozen_fields_are_not_reached_in_two_steps(admin: client.ApiClient, jobs: str) -> None:
    """Null first, the new value then; and a field that was never given, by patch and by replacement."""
    api = client.CustomObjectsApi(admin)
    job = merge(GOOD, {"metadata": {"name": "two-steps"}, "spec": {"trainer": {"microBatchTokens": 512}}})
    api.create_namespaced_custom_object(GROUP, VERSION, jobs, PLURAL, job)
    for patch in (
        {"trainer": {"microBatchTokens": None}},
        {"trainer": {"microBatchTokens": 1024}},
        {"trainer": None},
        {"evaluation": {"everySteps": 10, "prompts": 4}},
        {"inference": {"image": "example.test/vllm:2"}},
        {"inference": None, "trainer": {"microBatchTokens": 1024}},
    ):
        with pytest.raises(client.ApiException, match="cannot change while the job runs"):
            api.patch_namespaced_custom_object(
                GROUP, VERSION, jobs, PLURAL, "two-steps", {"spec": patch}, _content_type="application/merge-patch+json"
            )
        current = api.get_namespaced_custom_object(GROUP, VERSION, jobs, PLURAL, "two-steps")
        assert current["metadata"]["generation"] == 1
        with pytest.raises(client.ApiException, match="cannot change while the job runs"):
            api.replace_namespaced_custom_object(
                GROUP, VERSION, jobs, PLURAL, "two-steps", merge(current, {"spec": patch})
            )


def test_the_scale_subresource_scales_a_running_job(cluster: Cluster, change: Ask, jobs: str) -> None:
    cluster.kubectl("scale", "-n", jobs, "rltj/running", "--replicas=5")
    assert cluster.kubectl.get("rltj/running", "-n", jobs)["spec"]["inference"]["replicas"] == 5


def test_a_change_must_be_right_too(change: Ask) -> None:
    refusal = change("suspended", fragment("spec: {trainer: {nodes: 2}}"))
    assert refusal is not None
    assert refusal.causes == [("spec.trainer.nodes", refusal.causes[0][1])]
    assert "(got 2); set it to 1" in refusal.causes[0][1]


# --- kubectl explain --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", ".algorithm", ".algorithm.loss", ".trainer", ".trainer.optimizer", ".checkpoint"])
def test_explain_says_what_every_field_is_for(cluster: Cluster, path: str) -> None:
    model: Any = RLTrainingJob.model_fields["spec"].annotation
    for name in filter(None, path.split(".")):
        field = next(field for field in model.model_fields.values() if field.alias == name)
        model = inner_model(field.annotation)
    explained = " ".join(cluster.kubectl("explain", f"rltj.spec{path}").split())
    for field in model.model_fields.values():
        assert f"{field.alias} <" in explained
        assert " ".join((field.description or "missing").split()) in explained


def test_explain_tells_defaults_and_bounds(cluster: Cluster) -> None:
    explained = " ".join(cluster.kubectl("explain", "rltj.spec.trainer").split())
    assert "from its last checkpoint. Default 3, at least 0, at most 1000." in explained


@pytest.mark.parametrize("role", ROLES)
def test_explain_reaches_into_a_pod_template(cluster: Cluster, role: str) -> None:
    explained = cluster.kubectl("explain", f"rltj.spec.{role}.podTemplate.spec.containers.env")
    assert "one that the run sets itself is refused" in " ".join(explained.split())


def test_explain_tells_which_engine_flags_are_refused_and_why(cluster: Cluster) -> None:
    explained = " ".join(cluster.kubectl("explain", "rltj.spec.inference.engineArgs").split())
    assert "Refused: it is set by the run itself; remove it: set spec.model.dtype." in explained
