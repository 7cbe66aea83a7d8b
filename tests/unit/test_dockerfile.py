"""The Dockerfile and the code agree: user, commands, requirements, version. No image is built for it."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from inflight_operator.settings import Settings
from support.cluster_jobs import children, make_job, workloads

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(lock: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements" / lock).read_text().lower(), re.MULTILINE))


def stage(name: str) -> str:
    """The instructions of a stage, with those of the stage that it begins with."""
    found = re.search(rf"^FROM (\S+) AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    parent, text = found.groups()
    return text if "$" in parent else stage(parent) + text


@pytest.mark.parametrize("target", ["operator", "runtime"])
def test_the_user_is_the_one_that_pods_get(target: str) -> None:
    user = Settings().run_as
    assert f"\nUSER {user}:{user}\n" in stage(target)
    assert f"inflight:x:{user}:{user}:" in stage(target)
    deployment = yaml.safe_load((ROOT / "manifests/base/deployment.yaml").read_text())
    security = deployment["spec"]["template"]["spec"]["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (user, user)


def test_the_operators_command_is_the_deployments() -> None:
    deployment = yaml.safe_load((ROOT / "manifests/base/deployment.yaml").read_text())
    (operator,) = deployment["spec"]["template"]["spec"]["containers"]
    assert f"ENTRYPOINT {operator['command']}".replace("'", '"') in stage("operator")
    assert operator["image"] == f"inflight-operator:{PROJECT['version']}"


def test_every_command_of_a_pod_comes_from_the_image() -> None:
    """Its program is put on the PATH by the environment itself, or by a package that the lock holds."""
    templates = workloads(children(make_job(model={"source": "organization/model"})))
    programs = {
        container["command"][0] for template in templates.values() for container in template["spec"]["containers"]
    }
    assert programs == {"python", "hf"}
    for lock in ("runtime-cpu.txt", "runtime-cuda.txt"):
        assert {"huggingface-hub", "torch", "transformers"} <= pins(lock)
    assert "PATH=/opt/inflight/bin:" in stage("runtime")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_devices_requirements_are_there(device: str) -> None:
    assert "requirements/runtime-${DEVICE}.txt" in DOCKERFILE
    assert "torch" in pins(f"runtime-{device}.txt")


def test_every_file_that_is_copied_is_sent_to_the_builder() -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    assert copied
    for line in copied:
        for source in line.split()[:-1]:
            assert source.split("/")[0] in sent, source
            for device in ("cpu", "cuda"):
                assert (ROOT / source.replace("${DEVICE}", device)).exists(), source


def test_the_version_is_the_projects() -> None:
    assert set(re.findall(r"^ARG VERSION=(.*)$", DOCKERFILE, re.MULTILINE)) == {PROJECT["version"]}


def test_the_base_is_pinned_to_the_python_of_the_locks() -> None:
    (base,) = re.findall(r"^ARG BASE_IMAGE=(.*)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:3\.11(\.\d+)?-slim-bookworm", base)
    assert "for Python 3.11" in (ROOT / "requirements/runtime-cpu.txt").read_text()


def test_tools_of_the_build_are_locked() -> None:
    """What builds the wheel has its version from the lock that also serves developers."""
    (names,) = re.findall(r"grep -E '\^\(([a-z|-]+)\)==' /build/dev-cpu.txt", DOCKERFILE)
    assert set(names.split("|")) <= pins("dev-cpu.txt")
    assert "hatchling" in names.split("|")


def test_what_an_image_without_gpu_leaves_out_is_in_the_lock() -> None:
    cpu_image = script("cpu_image")
    lock = (ROOT / "requirements/runtime-cpu.txt").read_text()
    assert pins("runtime-cpu.txt") >= cpu_image.LEFT_OUT
    kept = {line.partition("==")[0] for line in cpu_image.wanted(lock).splitlines()}
    assert kept == pins("runtime-cpu.txt") - cpu_image.LEFT_OUT
    # PyTorch asks these two whether there is a GPU.
    assert {"nvidia-cuda-runtime", "nvidia-cuda-cupti"} <= kept


def test_a_stand_in_fails_and_says_why() -> None:
    cpu_image = script("cpu_image")
    code = cpu_image.source("libcudnn.so.9", {"cudnnCreate": "libcudnn.so.9", "cudnnGetErrorString": "libcudnn.so.9"})
    assert "long cudnnCreate(void) { return 1; }" in code
    assert "const char *cudnnGetErrorString(void) { return left_out; }" in code
    assert cpu_image.version_script({"b": "V1", "a": "V1"}) == "V1 { global: a; b; };\n"
    assert cpu_image.version_script({"a": ""}) == "{ global: *; };\n"


def test_a_zipped_package_is_imported_from_its_zip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a_zipped_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from .inner import VALUE\n")
    (package / "inner" / "__init__.py").write_text("VALUE = 3\n")
    (package / "py.typed").touch()
    archive = script("zip_package").zip_package(tmp_path, package.name)
    assert not package.exists()
    assert (tmp_path / f"{package.name}.pth").read_text() == f"{archive}\n"
    with zipfile.ZipFile(archive) as opened:
        assert {name for name in opened.namelist() if "inner" in name} == {
            f"{package.name}/inner/__init__.py",
            f"{package.name}/inner/__init__.pyc",
        }
    monkeypatch.syspath_prepend(str(archive))
    module = importlib.import_module(package.name)
    for name in (package.name, f"{package.name}.inner"):
        monkeypatch.delitem(sys.modules, name)
    assert module.VALUE == 3
    assert str(module.__file__).startswith(str(archive))
