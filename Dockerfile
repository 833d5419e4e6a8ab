# The daemon: docker build -t gpumond --build-arg REVISION=$(git rev-parse HEAD) . For Docker, Podman and Kubernetes: docs/how-to/install-container.md
FROM python:3.13.7-slim-trixie AS build
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY deploy/requirements deploy/requirements
COPY deploy/man deploy/man
COPY deploy/scripts deploy/scripts
COPY deploy/site-packages deploy/site-packages
COPY docs/how-to/runbooks.md docs/how-to/runbooks.md
COPY gpumond gpumond
ARG REVISION=
RUN python3 -m pip download --no-cache-dir --disable-pip-version-check --require-hashes --only-binary=:all: \
      --dest /tmp/wheels -r deploy/requirements/daemon.txt -r deploy/requirements/build.txt \
 && python3 -m venv --without-pip /opt/gpumond \
 && GPUMOND_REVISION=$REVISION python3 -m pip --python /opt/gpumond/bin/python3 install --no-cache-dir --no-compile --disable-pip-version-check \
      --no-index --find-links /tmp/wheels ".[daemon,kubernetes]" \
 && python3 -m compileall -q /opt/gpumond/lib

FROM python:3.13.7-slim-trixie
LABEL org.opencontainers.image.title="gpumond" \
      org.opencontainers.image.description="GPU memory accounting, alerts and flushes with a receipt." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.base.name="docker.io/library/python:3.13.7-slim-trixie"
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /var/lib/gpumond --shell /usr/sbin/nologin gpumond \
 && install -d -o gpumond -g gpumond -m 0755 /run/gpumond \
 && install -d -o gpumond -g gpumond -m 0700 /var/lib/gpumond
COPY --from=build /opt/gpumond /opt/gpumond
ENV PATH=/opt/gpumond/bin:$PATH \
    GPUMOND_SOURCE=all \
    GPUMOND_SOCKET=/run/gpumond/agent.sock \
    GPUMOND_RUNTIME_DIR=/tmp/gpumond \
    GPUMOND_STATE_DIR=/var/lib/gpumond \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility
USER 10001:10001
EXPOSE 9917
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s CMD ["gpumond", "status", "--healthy"]
ENTRYPOINT ["gpumond"]
CMD ["serve"]
