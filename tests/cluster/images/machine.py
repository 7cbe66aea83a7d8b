"""How this machine reaches package indexes, for the builds: mounted into them, so that no image keeps any of it."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from control_plane.cluster import ClusterError

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
"""The machine's bundle of certificates, on Debian; a machine may trust one more than the base image does."""
PIP_FILES = ("/etc/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf")
PIP_OPTIONS = ("index-url", "extra-index-url", "find-links", "trusted-host", "cert", "client-cert", "proxy", "timeout")
PIP_NAMES = {"default-timeout": "timeout"}
MOUNT_POINTS = ("etc/pip.conf", "etc/apt/apt.conf.d/99build-machine")
"""Files that the base image holds, empty, so that a mount over them leaves nothing new in a layer."""
SUITE = "bookworm"
APT_OPTIONS = re.compile(r"(Acquire::(https?|Retries|AllowInsecure|Check-Valid-Until)\S*|APT::Authentication\S*) ")


@contextlib.contextmanager
def mounts() -> Iterator[list[str]]:
    """Arguments for ``buildah build`` that lend a build this machine's settings of pip, apt and TLS.

    Raises:
        ClusterError: apt has no source of Debian's packages.
    """
    with tempfile.TemporaryDirectory(prefix="inflight-build-settings-") as work:
        options = pip_options(os.environ)
        files = {
            "/etc/pip.conf": pip_config(options),
            "/etc/apt/apt.conf.d/99build-machine": apt_config(),
            "/etc/apt/sources.list": sources(sites()),
        }
        arguments: list[str] = []
        for number, (target, content) in enumerate(files.items()):
            source = Path(work) / str(number)
            source.write_text(content)
            arguments += ["--volume", f"{source}:{target}:ro"]
        if (bundle := certificates(os.environ)) is not None:
            arguments += ["--volume", f"{bundle}:{CERTIFICATES}:ro"]
        for link in filter(_is_directory, options.get("find-links", "").split()):
            arguments += ["--volume", f"{link}:{link}:ro"]
        yield arguments


def pip_options(environ: Mapping[str, str], files: Sequence[str | Path] = PIP_FILES) -> dict[str, str]:
    """Pip's settings that say where packages come from; the environment wins over files, as in pip itself."""
    found: dict[str, str] = {}
    for file in (*files, environ.get("PIP_CONFIG_FILE", os.devnull)):
        parser = configparser.RawConfigParser(strict=False)
        parser.read(Path(file).expanduser())
        for section in ("global", "install"):
            if parser.has_section(section):
                found |= {name.replace("_", "-"): value for name, value in parser.items(section)}
    prefix = "PIP_"
    found |= {
        name.removeprefix(prefix).lower().replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith(prefix) and value
    }
    renamed = {PIP_NAMES.get(name, name): value for name, value in found.items()}
    links = [link for link in renamed.pop("find-links", "").split() if "://" in link or _is_directory(link)]
    if links:
        renamed["find-links"] = " ".join(links)
    return {name: renamed[name] for name in PIP_OPTIONS if name in renamed}


def pip_config(options: Mapping[str, str]) -> str:
    """A pip.conf for the builds, where the certificates lie in their usual place."""
    parser = configparser.RawConfigParser()
    parser["global"] = {**options, **({"cert": CERTIFICATES} if "cert" in options else {})}
    lines = ["[global]", *(f"{name} = {value}" for name, value in parser["global"].items())]
    return "\n".join(line.replace("\n", "\n  ") for line in lines) + "\n"


def certificates(environ: Mapping[str, str]) -> Path | None:
    """The machine's bundle of certificates, if it has one."""
    for named in (environ.get("PIP_CERT"), environ.get("SSL_CERT_FILE"), CERTIFICATES):
        if named and Path(named).is_file():
            return Path(named).resolve()
    return None


def sites() -> dict[str, str]:
    """Where this machine gets each suite of the base image's Debian from."""
    text = _ask("apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(SITE)", "Created-By: Packages")
    found: dict[str, str] = {}
    for line in text.splitlines():
        release, component, site = line.split()
        if release in (SUITE, f"{SUITE}-updates", f"{SUITE}-security") and component == "main":
            found.setdefault(release, site)
    if SUITE not in found:
        raise ClusterError(f"apt knows no source of Debian {SUITE}'s packages, which the base image is made from")
    return found


def sources(of_suites: Mapping[str, str]) -> str:
    """A sources.list."""
    return "".join(f"deb {site} {suite} main\n" for suite, site in of_suites.items())


def apt_config() -> str:
    """This machine's way to apt's sources: proxies, retries and what it trusts."""
    dumped = _ask("apt-config", "dump", "--no-empty")
    return "".join(f"{line}\n" for line in dumped.splitlines() if APT_OPTIONS.match(line))


def _is_directory(link: str) -> bool:
    """Whether a place that pip looks into is a directory with something in it."""
    return Path(link).is_dir() and any(Path(link).iterdir())


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError(f"{' '.join(command)} failed ({error}): images are built on Debian here") from error
