#!/usr/bin/env bash
# Make .venv of this clone: find a Python, then hand over to bootstrap.py (see there for what is made where).
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"

# The lock was made for 3.11, so that one is preferred; INFLIGHT_PYTHON names another.
for candidate in ${INFLIGHT_PYTHON:-python3.11 python3 python3.12 python3.13}; do
  if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    exec "$candidate" -I "$here/bootstrap.py" "$@"
  fi
done
echo "bootstrap: no Python 3.11, 3.12 or 3.13 found (tried: ${INFLIGHT_PYTHON:-python3.11 python3 python3.12 python3.13})." >&2
echo "bootstrap: install one (Debian, Ubuntu: apt-get install python3.11 python3.11-venv) or set INFLIGHT_PYTHON to its path." >&2
exit 1
