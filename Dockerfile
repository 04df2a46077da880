# Two images from one file, both on Debian's own Python:
#
#   docker build --target merger -t merger .       docker run --rm -v "$PWD/ckpt:/in:ro" -v "$PWD/out:/out" merger merge /in /out
#   docker build --target suite -t merger-suite .  the tests:   docker run --rm --network none merger-suite
#
# PyPI's torch for Linux carries CUDA; for a small image add
#   --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

FROM debian:bookworm-slim AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

FROM base AS build
ARG PIP_EXTRA_INDEX_URL
RUN python3 -m venv /opt/merger
# Dependencies first: they change less often than the code, and a layer of their own is kept.
COPY constraints/ /src/constraints/
RUN /opt/merger/bin/pip install --no-cache-dir -c /src/constraints/test.txt isal numpy safetensors torch tqdm transformers
COPY pyproject.toml README.md LICENSE /src/
COPY merger/ /src/merger/
RUN /opt/merger/bin/pip install --no-cache-dir -c /src/constraints/test.txt /src

FROM base AS suite
ARG PIP_EXTRA_INDEX_URL
RUN useradd --create-home tester
WORKDIR /home/tester/merger
RUN python3 -m venv /opt/nox && /opt/nox/bin/pip install --no-cache-dir nox && chown tester: /home/tester/merger
COPY --chown=tester: . .
USER tester
ENV PATH=/opt/nox/bin:$PATH PIP_NO_CACHE_DIR=1
# Installs all that the tests need, so that they run without a network.
RUN nox -s dev
CMD ["nox", "-s", "multirank"]

FROM base AS merger
COPY --from=build /opt/merger /opt/merger
RUN useradd --create-home merger
ENV PATH=/opt/merger/bin:$PATH HF_HUB_OFFLINE=1
USER merger
WORKDIR /home/merger
ENTRYPOINT ["merger"]
CMD ["--help"]
