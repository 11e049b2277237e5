# plainrl on NVIDIA GPUs: docker build -f tools/launch/docker/gpu.Dockerfile -t plainrl-gpu . (docs/gpu.md)
# CUDA's libraries come with the wheels of torch, the driver from the host by the NVIDIA container toolkit.
FROM python:3.11-slim
# g++ (with gcc) and libc6-dev are for torch.compile and Triton, which compile at run time; libseccomp2 for the sandbox
RUN apt-get update && apt-get install -y --no-install-recommends g++ git libc6-dev libseccomp2 make \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home plainrl && install -d -o plainrl -g plainrl /home/plainrl/plainrl
USER plainrl
WORKDIR /home/plainrl/plainrl
COPY --chown=plainrl:plainrl Makefile ./
COPY --chown=plainrl:plainrl tools/launch/requirements-gpu.txt tools/launch/requirements-cpu.txt tools/launch/
# the machine that builds the image need not have a GPU
RUN make setup GPU=1 && rm -rf /home/plainrl/.cache
COPY --chown=plainrl:plainrl . .
RUN .venv/bin/python data/toy_vision.py --rows
ENV PATH=/home/plainrl/plainrl/.venv/bin:$PATH NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["python", "grpo.py", "--help"]
