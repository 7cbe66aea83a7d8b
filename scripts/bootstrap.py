"""Make this clone's ``.venv`` from the locked requirements; the second time takes a moment.

Three parts, so that many clones share the heavy one:

* the tool environment (uv) and
* the dependency environment, named after the lock it was installed from, both in the cache directory
  (``$INFLIGHT_CACHE``, else ``$XDG_CACHE_HOME/inflight``, else ``~/.cache/inflight``);
* ``.venv`` in the clone: this project, editable, and a ``.pth`` line that points to the dependency environment.

An environment is built under a temporary name and renamed when it is whole; a file lock keeps two runs apart.
Needs the standard library only.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "dev-cpu.txt"
SCHEME = "2"
"""Raised when this script builds environments in another way, so that old ones are not taken for new ones."""
UV_VERSION = "0.13.9"
INSTALL_ATTEMPTS = 3


class BootstrapError(Exception):
    """The environment cannot be made; the message says what to do."""


def cache_directory() -> Path:
    if explicit := os.environ.get("INFLIGHT_CACHE"):
        return Path(explicit).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "inflight"


def python_tag() -> str:
    return f"cp{sys.version_info[0]}{sys.version_info[1]}-{sys.platform}-{platform.machine()}"


def digest(*parts: bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()[:16]


def say(text: str) -> None:
    print(f"bootstrap: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another bootstrap is at work; waiting for it ({path})")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run(command: list[str]) -> None:
    environment = {**os.environ, "UV_HTTP_TIMEOUT": os.environ.get("UV_HTTP_TIMEOUT", "120")}
    environment.pop("VIRTUAL_ENV", None)
    environment.pop("PYTHONPATH", None)
    if "PIP_INDEX_URL" in environment:  # one setting for both installers
        environment.setdefault("UV_DEFAULT_INDEX", environment["PIP_INDEX_URL"])
    code = subprocess.run(command, env=environment, check=False).returncode
    if code != 0:
        raise BootstrapError(f"{' '.join(command)} ended with {code}; its messages are above")


def build_whole(target: Path, build: Callable[[Path], None]) -> None:
    """Build a directory under a temporary name beside ``target`` and rename it when ``build`` is through."""
    temporary = target.with_name(f"{target.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        build(temporary)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def ensure_uv(cache: Path) -> Path:
    target = cache / f"uv-{UV_VERSION}-{python_tag()}"
    uv = target / "bin" / "uv"
    if uv.exists():
        return uv

    def build(directory: Path) -> None:
        say(f"getting uv {UV_VERSION}")
        try:
            venv.create(directory, with_pip=True, symlinks=True)
        except (subprocess.CalledProcessError, OSError) as error:
            raise BootstrapError(
                f"{sys.executable} cannot make a virtual environment ({error}); on Debian and Ubuntu install "
                f"python{sys.version_info[0]}.{sys.version_info[1]}-venv, or set INFLIGHT_PYTHON to another Python"
            ) from error
        run([str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", f"uv=={UV_VERSION}"])

    with file_lock(cache / "uv.lock"):
        if not uv.exists():
            build_whole(target, build)
    return uv


def ensure_dependencies(cache: Path, uv: Path) -> Path:
    """Install the locked requirements once per lock; return their site-packages."""
    target = cache / f"deps-{digest(SCHEME.encode(), python_tag().encode(), LOCK.read_bytes())}"
    if not target.exists():
        with file_lock(cache / "deps.lock"):
            if not target.exists():
                build_whole(target, lambda directory: install_dependencies(uv, directory))
    return site_packages(target)


def install_dependencies(uv: Path, directory: Path) -> None:
    say(f"installing {LOCK.relative_to(ROOT)} (about 6 GB on disk; once for all clones on this machine)")
    started = time.monotonic()
    run([str(uv), "venv", "--quiet", "--no-project", "--python", sys.executable, str(directory)])
    command = [str(uv), "pip", "install", "--quiet", "--no-deps", "--python", str(directory / "bin" / "python")]
    # Importing vLLM compiles thousands of files: half a minute for each process that finds no bytecode.
    command.append("--compile-bytecode")
    for attempt in range(1, INSTALL_ATTEMPTS + 1):
        try:
            run([*command, "--requirement", str(LOCK)])
            break
        except BootstrapError:
            if attempt == INSTALL_ATTEMPTS:
                raise
            say("the installation was cut off; trying again with what is already fetched")
    say(f"installed in {time.monotonic() - started:.0f} s")


def site_packages(environment: Path) -> Path:
    return environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def ensure_clone(uv: Path, dependencies: Path) -> None:
    """Make ``.venv``: light, and rebuilt only when what it stands on has changed."""
    environment = ROOT / ".venv"
    stamp_file = environment / ".inflight-bootstrap.json"
    stamp = {
        "scheme": SCHEME,
        "python": sys.version.split()[0],
        "base": sys.base_prefix,
        "root": str(ROOT),
        "dependencies": str(dependencies),
        "project": digest((ROOT / "pyproject.toml").read_bytes()),
    }
    if stamp_file.exists() and (environment / "bin" / "python").exists():
        with contextlib.suppress(ValueError):
            if json.loads(stamp_file.read_text()) == stamp:
                return
    say("making .venv")
    # Not cleared when it is there: a process that runs from it goes on.
    run([str(uv), "venv", "--quiet", "--no-project", "--allow-existing", "--python", sys.executable, str(environment)])
    (site_packages(environment) / "_inflight_deps.pth").write_text(f"{dependencies}\n")
    python = str(environment / "bin" / "python")
    install = [str(uv), "pip", "install", "--quiet", "--python", python, "--no-deps", "--no-build-isolation"]
    run([*install, "--editable", str(ROOT)])
    stamp_file.write_text(json.dumps(stamp, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print-uv", action="store_true", help="get uv only and print its path")
    arguments = parser.parse_args()
    cache = cache_directory()
    try:
        uv = ensure_uv(cache)
        if arguments.print_uv:
            print(uv)
            return 0
        dependencies = ensure_dependencies(cache, uv)
        with file_lock(cache / f"clone-{digest(str(ROOT).encode())}.lock"):
            ensure_clone(uv, dependencies)
    except (BootstrapError, OSError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
