# docker build -f docker/cuda.Dockerfile -t jaxpp-flax:cuda . && docker run --rm --gpus all jaxpp-flax:cuda
# CUDA's libraries come with the wheels of JAX and CuPy: the host needs a driver (for CUDA 13: 580 or newer) and the NVIDIA Container Toolkit.
# `--build-arg EXTRA=cuda12` for older drivers.
FROM python:3.13-slim
ARG EXTRA=cuda13
WORKDIR /opt/jaxpp_flax
COPY pyproject.toml README.md LICENSE ./
COPY jaxpp_flax jaxpp_flax
COPY examples examples
RUN pip install --no-cache-dir ".[${EXTRA}]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
CMD ["python", "-m", "jaxpp_flax.doctor"]
