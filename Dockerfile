# The images of Inflight: `operator`, and `runtime` for every role of a job. See docs/images.md.
#
#   docker build --target operator -t inflight-operator:0.1.0 .
#   docker build --target runtime -t inflight-runtime:0.1.0 .
#   docker build --target runtime --build-arg DEVICE=cuda -t inflight-runtime:0.1.0-cuda .
#
# Everything of ours is one virtual environment, /opt/inflight, made by the Python of the base that it is copied to. What
# is heavy is a layer of its own, below the project's code: a change of code makes a new layer of 4 MB.

# Debian or one of its children, with Python 3.11 (the requirements are locked for it) as `python3`.
ARG BASE_IMAGE=python:3.11-slim-bookworm


FROM ${BASE_IMAGE} AS tools
# pip stays here: the images hold an environment without it.
RUN python3 -c 'import sys; assert sys.version_info[:2] == (3, 11), "the requirements are locked for Python 3.11"' \
 && python3 -m venv /opt/tools \
 && /opt/tools/bin/pip install --no-cache-dir pip==26.3 \
 && python3 -m venv --without-pip /opt/inflight
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_COMPILE=1


FROM tools AS project
WORKDIR /src
COPY requirements/dev-cpu.txt requirements/
RUN grep -E '^(hatchling|packaging|pathspec|pluggy|trove-classifiers)==' requirements/dev-cpu.txt >build.txt \
 && /opt/tools/bin/pip install --no-deps --requirement build.txt
COPY pyproject.toml README.md LICENSE ./
COPY operator operator
COPY runtime runtime
RUN /opt/tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/tools/bin/pip --python /opt/inflight/bin/python install --no-deps --no-index /wheels/*.whl \
 && python3 -m compileall -q /opt/inflight/lib


FROM tools AS operator-dependencies
COPY requirements/operator.txt scripts/zip_package.py /build/
RUN /opt/tools/bin/pip --python /opt/inflight/bin/python install --no-deps --requirement /build/operator.txt \
 && python3 /build/zip_package.py /opt/inflight/lib/python3.11/site-packages kubernetes \
 && python3 -m compileall -q -j 0 /opt/inflight/lib


FROM tools AS runtime-dependencies
ARG DEVICE=cpu
# A compiler for the stand-ins of scripts/cpu_image.py; it stays here.
RUN if [ "${DEVICE}" = cpu ]; then \
      apt-get update && apt-get install --yes --no-install-recommends gcc && rm -rf /var/lib/apt/lists/*; \
    fi
COPY requirements/runtime-${DEVICE}.txt scripts/cpu_image.py /build/
RUN if [ "${DEVICE}" = cpu ]; then \
      python3 /build/cpu_image.py requirements /build/runtime-cpu.txt >/build/requirements.txt; \
    else \
      cp /build/runtime-${DEVICE}.txt /build/requirements.txt; \
    fi \
 && /opt/tools/bin/pip --python /opt/inflight/bin/python install --no-deps --requirement /build/requirements.txt \
 && if [ "${DEVICE}" = cpu ]; then \
      python3 /build/cpu_image.py stand-ins /opt/inflight/lib/python3.11/site-packages; \
    fi \
 && python3 -m compileall -q -j 0 /opt/inflight/lib


FROM ${BASE_IMAGE} AS base
# The operator gives every pod this user (`runAs` in its settings).
RUN echo "inflight:x:10001:10001::/tmp:/usr/sbin/nologin" >>/etc/passwd && echo "inflight:x:10001:" >>/etc/group
# The root file system may be read-only: what libraries cache goes to /tmp.
ENV PATH=/opt/inflight/bin:${PATH} HOME=/tmp PYTHONUNBUFFERED=1


FROM base AS operator
COPY --from=operator-dependencies /opt/inflight /opt/inflight
COPY --from=project /opt/inflight /opt/inflight
USER 10001:10001
ENTRYPOINT ["python", "-m", "inflight_operator"]
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="inflight-operator" \
      org.opencontainers.image.description="Kubernetes operator of Inflight: asynchronous RL post-training of language models" \
      org.opencontainers.image.vendor="The Inflight authors" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.documentation="https://inflight.dev/docs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"


FROM base AS runtime
ARG DEVICE=cpu
# vLLM's CPU kernels are linked with libnuma. On a GPU, Triton compiles its launchers with a C compiler at run time.
RUN apt-get update \
 && if [ "${DEVICE}" = cpu ]; then packages=libnuma1; else packages="gcc libc6-dev libnuma1"; fi \
 && apt-get install --yes --no-install-recommends ${packages} \
 && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log
COPY --from=runtime-dependencies /opt/inflight /opt/inflight
COPY --from=project /opt/inflight /opt/inflight
USER 10001:10001
CMD ["inflight", "--help"]
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="inflight-runtime" \
      org.opencontainers.image.description="Every role of an Inflight run: coordinator, inference server (vLLM), actor, trainer" \
      org.opencontainers.image.vendor="The Inflight authors" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.documentation="https://inflight.dev/docs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
