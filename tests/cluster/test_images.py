"""The images: what is in them, what is not, and that every command of a pod runs as a pod runs it."""

from __future__ import annotations

import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.images import Image, build_image
from cluster.images.build import ROOT, version
from cluster.images.container import USER, Container, container
from cluster.images.machine import pip_options
from control_plane.cluster import ClusterError

OPERATOR_BYTES = 250_000_000
"""Of the whole image, its base included: its layers, uncompressed."""
RUNTIME_BYTES = 3_600_000_000
ROLES = ("coordinator", "inference", "actor", "trainer")
SITE_PACKAGES = "opt/inflight/lib/python3.11/site-packages"
TOOLS = ("gcc", "cc", "c++", "g++", "make", "ld", "pip", "pip3", "git", "curl")
RUN_DEADLINE_S = 400.0


@pytest.fixture(scope="module")
def operator_image() -> Image:
    return build_image("operator")


@pytest.fixture(scope="module")
def runtime_image() -> Image:
    return build_image("runtime")


@pytest.fixture(scope="module")
def operator(operator_image: Image) -> Iterator[Container]:
    with container(operator_image) as running:
        yield running


@pytest.fixture(scope="module")
def runtime(runtime_image: Image) -> Iterator[Container]:
    with container(runtime_image) as running:
        yield running


@pytest.fixture(params=["operator", "runtime"])
def either(request: pytest.FixtureRequest) -> Container:
    found: Container = request.getfixturevalue(request.param)
    return found


pytestmark = pytest.mark.timeout(600, func_only=True)


def test_the_operator_image_is_small(operator_image: Image) -> None:
    assert operator_image.size <= OPERATOR_BYTES


def test_the_runtime_image_without_gpu_holds_no_cuda(runtime_image: Image, runtime: Container) -> None:
    assert runtime_image.size <= RUNTIME_BYTES
    assert not (runtime.root / SITE_PACKAGES / "triton").exists()
    assert not list((runtime.root / SITE_PACKAGES).glob("nvidia/**/libcublas*"))


def test_an_archive_leaves_out_what_a_node_has(operator_image: Image) -> None:
    """Manifest and configuration are always in it; so a node with all layers gets a few kB."""
    with tarfile.open(operator_image.archive) as opened:
        names = opened.getnames()
    assert names[:2] == ["oci-layout", "index.json"]
    layers = {f"sha256:{Path(name).name}" for name in names[4:]}
    part = build_image("operator", present=layers)
    with tarfile.open(part.archive) as opened:
        assert opened.getnames() == names[:4]


@pytest.mark.parametrize("module", ["torch", "vllm", "transformers", "numpy", "aiohttp.web"])
def test_what_the_operator_image_holds(operator: Container, module: str) -> None:
    found = operator.run("python", "-c", f"import importlib.util as u; print(u.find_spec({module!r}) is not None)")
    assert found.strip() == str(module == "aiohttp.web")


def test_the_operator_starts(operator: Container) -> None:
    """It gets as far as a pod without a cluster can: every module is loaded."""
    assert operator.config["Entrypoint"] == ["python", "-m", "inflight_operator"]
    with pytest.raises(ClusterError, match="no credentials for a cluster"):
        operator.run(*operator.config["Entrypoint"])


def test_images_run_as_the_user_of_the_pods(either: Container) -> None:
    assert either.config["User"] == USER
    assert either.run("id").strip() == "uid=10001(inflight) gid=10001(inflight) groups=10001(inflight)"
    with pytest.raises(ClusterError, match="Read-only file system"):
        either.run("touch", "/opt/inflight/new")


def test_labels(either: Container) -> None:
    labels = either.config["Labels"]
    prefix = "org.opencontainers.image"
    assert labels[f"{prefix}.licenses"] == "Apache-2.0"
    assert labels[f"{prefix}.version"] == version()
    assert labels[f"{prefix}.title"].startswith("inflight-")
    assert labels[f"{prefix}.description"]


def test_nothing_of_this_machine_is_inside(either: Container) -> None:
    """Neither settings of pip and apt, nor a host name, nor a cache."""
    for name in ("etc/pip.conf", "etc/apt/apt.conf.d/99build-machine", "etc/hostname", "etc/hosts", "etc/resolv.conf"):
        assert (either.root / name).read_bytes() == b"", name
    addresses = re.findall(r"https?://([^/ ]+)", (either.root / "etc/apt/sources.list").read_text())
    assert set(addresses) == {"deb.debian.org"}
    assert not {name for name in either.environment if name.startswith(("PIP_", "UV_", "SSL_", "HTTP"))}
    for name in ("root", "tmp", "var/cache/apt", "var/lib/apt/lists", "var/log", "src", "build"):
        left = [path for path in (either.root / name).rglob("*") if path.is_file() and path.stat().st_size]
        assert not [path for path in left if path.name not in (".bashrc", ".profile")], name


def test_the_machines_indexes_are_not_named_in_any_layer(either: Container) -> None:
    named = {host for value in pip_options({}).values() for host in re.findall(r"//(?:[^/@ ]*@)?([^/: ]+)", value)}
    history = str(either.config)
    assert not [host for host in named if host in history]


def test_no_build_tools_are_left(either: Container) -> None:
    path = either.environment["PATH"]
    assert [tool for tool in TOOLS if shutil.which(str(either.root / tool.lstrip("/"))) is not None] == []
    places = [either.root / directory.lstrip("/") for directory in path.split(":")]
    assert [tool for tool in TOOLS for place in places if (place / tool).exists()] == []


def test_everything_is_compiled(either: Container) -> None:
    """A root file system that is read-only keeps no bytecode: a module without it is compiled at every start."""
    packages = either.root / SITE_PACKAGES
    for source in ("inflight_runtime/protocol.py", "inflight_operator/__main__.py", "pydantic/main.py"):
        compiled = packages / Path(source).parent / "__pycache__" / f"{Path(source).stem}.cpython-311.pyc"
        assert compiled.exists(), source


@pytest.mark.parametrize("role", ROLES)
def test_every_role_starts(runtime: Container, role: str) -> None:
    assert "--config" in runtime.run("python", "-m", f"inflight_runtime.{role}", "--help")


@pytest.mark.parametrize(
    "command", [["python", "-m", "inflight_runtime.trainer.launch"], ["hf", "download"], ["inflight"]]
)
def test_the_pods_other_commands_are_there(runtime: Container, command: list[str]) -> None:
    assert "usage" in runtime.run(*command, "--help").lower()


def test_without_gpu_pytorch_says_so(runtime: Container) -> None:
    """The stand-ins for CUDA's libraries never let anybody believe that there is a GPU."""
    asked = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count()); torch.zeros(1, device='cuda')"
    with pytest.raises(ClusterError, match=r"False 0\n(.*\n)*.*(no NVIDIA driver|not compiled with CUDA)"):
        runtime.run("python", "-c", asked)


def test_a_run_in_the_image(runtime: Container) -> None:
    """The example learns in it for a few steps: coordinator, actor, trainer, and a real vLLM server."""
    script = """
    set -e
    mkdir /tmp/example
    cp /mnt/*.py /mnt/job.yaml /tmp/example
    python /tmp/example/make_model.py
    cd /tmp
    inflight run /tmp/example/job.yaml --set spec.algorithm.steps=6 --set spec.evaluation=null \
      --set spec.inference.replicas=1
    """
    said = runtime.run("sh", "-c", script, mounts={ROOT / "examples/sort-letters": "/mnt"}, deadline_s=RUN_DEADLINE_S)
    assert "sort-letters: succeeded" in said
    assert "6 of 6" in said
