# syntax=docker/dockerfile:1
# Targets: cli (submit, watch, results; no torch), cpu (worker on CPUs), cuda (worker on NVIDIA GPUs).
#   docker build --target cpu -t nightmill:0.1.0-cpu .
#   docker build --target cpu --build-arg TORCH_INDEX_URL=… .    an index whose torch has no CUDA in it: GBs less

FROM python:3.11.15-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    NIGHTMILL_HOME=/var/lib/nightmill \
    NIGHTMILL_CACHE=/var/cache/nightmill \
    # For whoever starts Celery's own worker program from this image: SIGTERM is to drain, as with `nightmill worker`.
    REMAP_SIGTERM=SIGQUIT
# The folders exist and are the user's: a named volume takes over owner and mode of what it covers.
RUN useradd --uid 10001 --no-create-home --home-dir /var/lib/nightmill --shell /usr/sbin/nologin nightmill \
    && install -d -o nightmill -g nightmill -m 700 /var/lib/nightmill /var/cache/nightmill
WORKDIR /var/lib/nightmill
STOPSIGNAL SIGTERM
ENTRYPOINT ["nightmill"]
CMD ["--help"]

FROM base AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY jobs jobs
COPY worker worker
COPY kernels kernels
COPY migrations migrations
RUN python -m pip wheel --no-deps --wheel-dir /wheel .

FROM base AS cli
RUN --mount=from=wheel,source=/wheel,target=/wheel \
    python -m pip install /wheel/*.whl
USER nightmill

# The kernels for CPUs are compiled for the processor at hand at first use, Triton's launchers likewise.
FROM base AS compiler
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

FROM compiler AS cpu
ARG TORCH_INDEX_URL=
RUN python -m pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch>=2.11,<2.14"
RUN --mount=from=wheel,source=/wheel,target=/wheel \
    python -m pip install "$(echo /wheel/*.whl)[worker]"
USER nightmill
EXPOSE 9102

FROM compiler AS cuda
RUN python -m pip install "torch>=2.11,<2.14"
RUN --mount=from=wheel,source=/wheel,target=/wheel \
    python -m pip install "$(echo /wheel/*.whl)[gpu]"
USER nightmill
EXPOSE 9102
