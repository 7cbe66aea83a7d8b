"""What is installed into a cluster, as data; ``python -m inflight_operator.install`` writes it to ``manifests/``.

The rules of RBAC are kept once (:mod:`.rbac`) and written to every form of the installation, so that none of them can
lack one. What is committed is compared with this by a test.
"""

from __future__ import annotations

from inflight_operator.install.files import DIRECTORY, render_files
from inflight_operator.install.rbac import LEASE_RULES, OPERATOR_RULES, USER_ROLES, Rule

__all__ = ["DIRECTORY", "LEASE_RULES", "OPERATOR_RULES", "USER_ROLES", "Rule", "render_files"]
