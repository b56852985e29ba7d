# The image of every process of compose.yaml but the two servers. For an app of your own, build on it or copy it.

FROM python:3.13-slim AS build
WORKDIR /build
COPY .ci/installer.txt requirements.lock pyproject.toml LICENSE README.md ./
# Every download is checked against a hash of this repository: the installer's own, then those of the lock.
RUN python -m pip install --no-cache-dir --require-hashes -r installer.txt
COPY durable_core durable_core
# The lock holds the tools of development too; as constraints it pins what is installed and adds nothing.
RUN uv venv /opt/durable \
    && uv pip install --python /opt/durable --no-cache --compile-bytecode \
        --constraints requirements.lock --build-constraints requirements.lock . flower

FROM python:3.13-slim
RUN useradd --system --uid 10001 --home-dir /app --shell /usr/sbin/nologin durable
COPY --from=build /opt/durable /opt/durable
WORKDIR /app
COPY beat_schedule.py ./
COPY tasks tasks
ENV PATH=/opt/durable/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER durable
CMD ["celery", "-A", "tasks", "worker", "--loglevel=INFO"]
