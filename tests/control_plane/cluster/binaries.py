"""The programs of the test cluster: compiled from Go modules, once per ``go.sum`` for all clones on a machine.

They live in the project's cache directory (``$INFLIGHT_CACHE``, else ``$XDG_CACHE_HOME/inflight``, else
``~/.cache/inflight``), each set in a directory named after what it was built from. A set is built under a temporary
name and renamed when it is whole; a file lock keeps two builds apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ClusterError

MODULES = Path(__file__).parent / "modules"
SCHEME = "1"
"""Raised when this module builds in another way, so that old builds are not taken for new ones."""
KUBERNETES_VERSION = "v1.34.4"
BUILD_DEADLINE_S = 1800.0
NO_GO = (
    "the test cluster is compiled from source and there is no `go` on the PATH: install Go 1.26 or newer "
    "(https://go.dev/doc/install), then try again"
)


@dataclass(frozen=True)
class BuildSet:
    """Programs that are built together.

    Attributes:
        module: the directory with the ``go.mod`` under ``modules/``.
        packages: the Go package of each program; ``.`` is the module's own.
        manifests: files to keep beside the programs: a module, and glob patterns in it.
        about: said before the build.
    """

    module: str
    packages: Mapping[str, str]
    about: str
    manifests: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


SETS = {
    "etcd": BuildSet("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}, "half a minute"),
    "kubernetes": BuildSet(
        "kubernetes",
        {
            "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
            "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
            "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
            "jobset": "sigs.k8s.io/jobset",
        },
        "three to four minutes on two cores",
        {
            "sigs.k8s.io/jobset": (
                "config/components/crd/bases/*.yaml",
                "config/components/webhook/manifests.yaml",
            )
        },
    ),
    "kwok": BuildSet(
        "kwok",
        {"kwok": "sigs.k8s.io/kwok/cmd/kwok"},
        "a minute",
        {
            "sigs.k8s.io/kwok": (
                "kustomize/stage/node/fast/node-*.yaml",
                "kustomize/stage/node/heartbeat/node-*.yaml",
                "kustomize/stage/pod/fast/pod-ready.yaml",
                "kustomize/stage/pod/fast/pod-delete.yaml",
            )
        },
    ),
    "node": BuildSet(
        "kubernetes",
        {"kubelet": "k8s.io/kubernetes/cmd/kubelet", "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy"},
        "under a minute after the API server's",
    ),
    "coredns": BuildSet("coredns", {"coredns": "."}, "a minute"),
    "pause": BuildSet("pause", {"pause": "."}, "a second"),
    "kubectl": BuildSet("kubernetes", {"kubectl": "k8s.io/kubernetes/cmd/kubectl"}, "under a minute"),
    "helm": BuildSet("helm", {"helm": "helm.sh/helm/v4/cmd/helm"}, "a minute or two"),
}


CONTROL_PLANE = ("etcd", "kubernetes")
FAKE_NODES = ("kwok",)
REAL_NODE = ("node", "coredns", "pause")
"""What each layer needs."""


@dataclass(frozen=True)
class Binaries:
    """Where everything is that a cluster runs.

    Attributes:
        programs: path of each program by name, ``kubectl`` included.
        jobset_crds: the JobSet CRD files.
        jobset_webhooks: JobSet's webhook configurations, as its project ships them.
        kwok_stages: kwok's own stages: nodes and pods become ready, pods go away when deleted; empty without kwok.
    """

    programs: Mapping[str, Path]
    jobset_crds: tuple[Path, ...]
    jobset_webhooks: Path
    kwok_stages: tuple[Path, ...]


def ensure_binaries(nodes: Sequence[str] = FAKE_NODES) -> Binaries:
    """Build what is not in the cache yet (about five minutes the first time) and return where everything is.

    Args:
        nodes: the sets that play the nodes, :data:`FAKE_NODES` or :data:`REAL_NODE`.

    Raises:
        ClusterError: Go is missing, or a build failed; the message says what to do.
    """
    wanted = [*CONTROL_PLANE, *nodes]
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        wanted.append("kubectl")
    built = {name: _ensure(name) for name in wanted}
    programs = {name: built[key] / "bin" / name for key in built for name in SETS[key].packages}
    if kubectl is not None:
        programs["kubectl"] = Path(kubectl)
    jobset = built["kubernetes"] / "manifests"
    return Binaries(
        programs,
        tuple(sorted(jobset.glob("config/components/crd/bases/*.yaml"))),
        jobset / "config" / "components" / "webhook" / "manifests.yaml",
        tuple(sorted((built["kwok"] / "manifests").rglob("*.yaml"))) if "kwok" in built else (),
    )


def ensure_program(name: str) -> Path:
    """Build a set of one program that the cluster itself does not run, if it is not in the cache yet: where it is.

    Raises:
        ClusterError: as :func:`ensure_binaries`.
    """
    return _ensure(name) / "bin" / name


def cache_directory() -> Path:
    """Where built programs are kept."""
    if explicit := os.environ.get("INFLIGHT_CACHE"):
        base = Path(explicit).expanduser().resolve()
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().resolve() / "inflight"
    return base / "test-cluster"


def _ensure(name: str) -> Path:
    target = cache_directory() / f"{name}-{_key(name)}"
    if target.exists():
        return target
    with _lock(target.parent / f"{name}.lock"):
        if not target.exists():
            _build_whole(name, target)
    return target


def _key(name: str) -> str:
    """Everything that decides what a build gives."""
    module = MODULES / SETS[name].module
    what = (SCHEME, KUBERNETES_VERSION, sys.platform, platform.machine(), SETS[name].packages, SETS[name].manifests)
    parts = [
        repr(what).encode(),
        (module / "go.mod").read_bytes(),
        (module / "go.sum").read_bytes(),
        *(source.read_bytes() for source in sorted(module.glob("*.go"))),
    ]
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()[:16]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"somebody else is building it; waiting ({path})")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build_whole(name: str, target: Path) -> None:
    """Build one set under a temporary name beside ``target``, and rename it when everything is there."""
    if shutil.which("go") is None:
        raise ClusterError(NO_GO)
    packages = SETS[name].packages
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "bin").mkdir(parents=True)
    try:
        started = time.monotonic()
        _say(f"building {', '.join(packages)} ({SETS[name].about}; once for all clones on this machine)")
        _go(SETS[name].module, "build", "-ldflags", _linker_flags(), "-o", _output(name, partial), *packages.values())
        if missing := [program for program in packages if not (partial / "bin" / program).exists()]:
            raise ClusterError(f"go build made no {', '.join(missing)}")
        for module, patterns in SETS[name].manifests.items():
            _copy_manifests(SETS[name].module, module, patterns, partial / "manifests")
        partial.rename(target)
        _say(f"built in {time.monotonic() - started:.0f} s")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _output(name: str, directory: Path) -> str:
    """What ``go build`` is to write: one program under its own name, several into one directory."""
    programs = [*SETS[name].packages]
    return f"{directory}/bin/{programs[0] if len(programs) == 1 else ''}"


def _copy_manifests(build_module: str, module: str, patterns: tuple[str, ...], target: Path) -> None:
    source = Path(_go(build_module, "list", "-m", "-f", "{{.Dir}}", module).strip())
    for pattern in patterns:
        found = sorted(source.glob(pattern))
        if not found:
            raise ClusterError(f"{module} has no {pattern} (looked in {source})")
        for file in found:
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())


def _linker_flags() -> str:
    """Strip the programs, and give those of Kubernetes a version: without one the API server calls itself v0.0.0."""
    major, minor, _ = KUBERNETES_VERSION.removeprefix("v").split(".")
    package = "k8s.io/component-base/version"
    values = {"gitVersion": KUBERNETES_VERSION, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return " ".join(["-s", "-w", *(f"-X {package}.{name}={value}" for name, value in values.items())])


def _go(module: str, *arguments: str) -> str:
    # CGO_ENABLED is part of Go's own cache key: a build with the other value would compile everything again.
    environment = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOWORK": "off"}
    command = ["go", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=MODULES / module,
            env=environment,
            capture_output=True,
            text=True,
            timeout=BUILD_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(command)} took longer than {BUILD_DEADLINE_S:g} s") from error
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)} in {MODULES / module} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def _say(text: str) -> None:
    sys.stderr.write(f"test cluster: {text}\n")
    sys.stderr.flush()
