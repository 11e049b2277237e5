# plainrl on CPUs: docker build -f tools/launch/docker/cpu.Dockerfile -t plainrl-cpu . (docs/gpu.md)
FROM python:3.11-slim
# libnuma1 is for vLLM, libseccomp2 for the sandbox of what a model writes
RUN apt-get update && apt-get install -y --no-install-recommends g++ git libc6-dev libnuma1 libseccomp2 make \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home plainrl && install -d -o plainrl -g plainrl /home/plainrl/plainrl
USER plainrl
WORKDIR /home/plainrl/plainrl
COPY --chown=plainrl:plainrl Makefile ./
COPY --chown=plainrl:plainrl tools/launch/requirements-gpu.txt tools/launch/requirements-cpu.txt tools/launch/
RUN make setup && rm -rf /home/plainrl/.cache
COPY --chown=plainrl:plainrl . .
RUN .venv/bin/python data/toy_vision.py --rows
ENV PATH=/home/plainrl/plainrl/.venv/bin:$PATH
CMD ["python", "grpo.py", "--help"]
