"""What ``inflight status`` and ``inflight logs`` are asked about: a local run's directory, or a job in a cluster.

As with kubectl: ``rltj/NAME`` is a job of the current context, ``rltj`` all of a namespace. With one of the options
that only a cluster has (``-n``, ``-A``, ``--context``, ``--kubeconfig``) a plain name is a job's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from inflight_runtime.api import API_VERSION, KIND

KINDS: Final = frozenset(
    name + group
    for name in ("rltj", KIND.lower(), f"{KIND.lower()}s")
    for group in ("", f".{API_VERSION.partition('/')[0]}")
)
NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class TargetError(Exception):
    """The arguments do not say what is meant; the message says what would."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster, as the user's kubeconfig knows it.

    Attributes:
        kubeconfig: path of the file; empty for ``$KUBECONFIG`` or the usual place.
        context: its name in the file; empty for the current one.
        namespace: empty for the context's own.
        all_namespaces: look into all of them.
    """

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    all_namespaces: bool = False

    @property
    def meant(self) -> bool:
        """Whether an option says that a cluster is meant."""
        return self != Cluster()


def job_in_cluster(text: str | None, cluster: Cluster) -> str | None:
    """The name of the job that is meant, empty for all of the namespace; ``None`` when a local run is meant.

    Args:
        text: the argument; ``None`` when there is none.
        cluster: the options.

    Raises:
        TargetError: it can be neither.
    """
    if cluster.all_namespaces and cluster.namespace:
        raise TargetError("--all-namespaces: excludes --namespace; give one of the two")
    if text is None:
        return "" if cluster.meant else None
    kind, slash, name = text.partition("/")
    if kind in KINDS and (not slash or NAME.fullmatch(name)):
        return name
    if not cluster.meant:
        return None
    if kind not in KINDS and slash and NAME.fullmatch(name) and NAME.fullmatch(kind):
        raise TargetError(f"{text}: there are only jobs to look at; write rltj/{name}")
    if not NAME.fullmatch(text):
        raise TargetError(f"{text}: is no job's name, and with these options a job in a cluster is meant")
    return text


def looks_like_a_job(text: str) -> bool:
    """Whether a job may be called so."""
    return NAME.fullmatch(text) is not None
