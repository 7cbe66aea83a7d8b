"""What is installed into a cluster, as data; ``python -m inflight_operator.install`` writes it.

The rules of RBAC are kept once (:mod:`.rbac`) and written to every form of the installation, kustomize's
(``manifests/``, :mod:`.files`) and Helm's (``charts/inflight/``, :mod:`.chart`), so that none of them can lack one.
What is committed is compared with this by a test.
"""

from __future__ import annotations

from inflight_operator.install.chart import CHART, render_chart
from inflight_operator.install.files import DIRECTORY, render_files
from inflight_operator.install.rbac import LEASE_RULES, OPERATOR_RULES, USER_ROLES, Rule

__all__ = [
    "CHART",
    "DIRECTORY",
    "LEASE_RULES",
    "OPERATOR_RULES",
    "USER_ROLES",
    "Rule",
    "render_chart",
    "render_files",
]
