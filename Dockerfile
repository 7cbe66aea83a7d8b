# The images of Inflight: `operator`, and `runtime` for every role of a job. See docs/images.md.
#
#   docker build --target operator -t inflight-operator:0.1.0 .
#   docker build --target runtime -t inflight-runtime:0.1.0 .
#   docker build --target runtime --build-arg DEVICE=cuda -t inflight-runtime:0.1.0 .
#
# Everything of ours is one virtual environment, /opt/inflight. What is heavy is a layer of its own below the project's
# code: a change of code makes a new layer of 4 MB. A file that is only needed to build goes in the step that needed it.

# Debian or one of its children, with Python 3.11 (the requirements are locked for it) and venv as `python3`.
ARG BASE_IMAGE=python:3.11-slim-bookworm


FROM ${BASE_IMAGE} AS base
# The operator gives every pod this user (`runAs` in its settings).
RUN echo "inflight:x:10001:10001::/tmp:/usr/sbin/nologin" >>/etc/passwd && echo "inflight:x:10001:" >>/etc/group
# The root file system may be read-only: what libraries cache goes to /tmp.
ENV PATH=/opt/inflight/bin:${PATH} HOME=/tmp PYTHONUNBUFFERED=1


FROM base AS project
COPY requirements/dev-cpu.txt scripts/image_environment.sh /build/
RUN grep -E '^(hatchling|packaging|pathspec|pluggy|trove-classifiers)==' /build/dev-cpu.txt >/build/requirements.txt \
 && /build/image_environment.sh /build/requirements.txt
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY operator operator
COPY runtime runtime
# An environment of its own, at the place where it will be: with nothing but the project, compiled.
RUN /build/tools/bin/pip --python /opt/inflight/bin/python wheel --no-deps --no-build-isolation --wheel-dir /build . \
 && rm -rf /opt/inflight \
 && python3 -m venv --without-pip /opt/inflight \
 && /build/tools/bin/pip --python /opt/inflight/bin/python install --no-deps --no-index /build/*.whl


FROM base AS operator
COPY requirements/operator.txt scripts/image_environment.sh scripts/zip_package.py /build/
RUN /build/image_environment.sh /build/operator.txt \
 && python3 /build/zip_package.py /opt/inflight/lib/python3.11/site-packages kubernetes \
 && python3 -m compileall -q -j 0 /opt/inflight/lib \
 && rm -rf /build
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
RUN if [ "${DEVICE}" = cpu ]; then packages=libnuma1; else packages="gcc libc6-dev libnuma1"; fi \
 && apt-get update \
 && apt-get install --yes --no-install-recommends ${packages} \
 && apt-get clean && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/*.log
COPY requirements/runtime-${DEVICE}.txt scripts/image_environment.sh scripts/cpu_image.py /build/
# On CPU the compiler makes stand-ins (scripts/cpu_image.py), and goes again. One file of PyTorch's own tests is written
# for a newer Python and does not compile.
RUN cp /build/runtime-${DEVICE}.txt /build/requirements.txt \
 && if [ "${DEVICE}" = cpu ]; then \
      python3 /build/cpu_image.py requirements /build/runtime-cpu.txt >/build/requirements.txt; \
    fi \
 && /build/image_environment.sh /build/requirements.txt \
 && if [ "${DEVICE}" = cpu ]; then \
      apt-get update && apt-get install --yes --no-install-recommends gcc \
      && python3 /build/cpu_image.py stand-ins /opt/inflight/lib/python3.11/site-packages \
      && apt-get purge --yes --auto-remove -o APT::AutoRemove::RecommendsImportant=false \
           -o APT::AutoRemove::SuggestsImportant=false gcc \
      && apt-get clean && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/*.log; \
    fi \
 && python3 -m compileall -q -j 0 -x py312_intrinsics /opt/inflight/lib \
 && rm -rf /build
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
