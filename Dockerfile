# Paceline on CPU, with its default model inside. The build and the run need nothing but this file's folder.
#   docker build -t paceline .
#   docker run -p 8000:8000 paceline
# On Linux torch as pip finds it brings CUDA; --build-arg PIP_EXTRA_INDEX_URL=... names an index of CPU builds.
FROM python:3.11-slim

# torch's threads.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*

ARG TORCH=torch==2.13.0
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PACELINE_CACHE=/var/cache/paceline
RUN pip install "$TORCH"

WORKDIR /opt/paceline
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY src src
RUN pip install .

RUN useradd --create-home paceline && install -d -o paceline "$PACELINE_CACHE"
USER paceline
RUN paceline models pull smollm2-135m-instruct

EXPOSE 8000
# SIGTERM drains; give it a little longer than --drain-seconds before the kill.
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=3)"]
ENTRYPOINT ["paceline", "serve", "--host", "0.0.0.0"]
