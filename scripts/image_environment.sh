#!/bin/sh
# Inside of an image build: make the environment /opt/inflight, without pip in it, and install locked requirements.
set -eu
python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "the requirements are locked for Python 3.11")'
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
python3 -m venv /build/tools
python3 -m venv --without-pip /opt/inflight
/build/tools/bin/pip install --quiet pip==26.3
exec /build/tools/bin/pip --python /opt/inflight/bin/python install --no-deps --no-compile --requirement "$1"
