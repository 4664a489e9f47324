# docker build -f docker/cpu.Dockerfile -t jaxpp-flax:cpu . && docker run --rm jaxpp-flax:cpu
FROM python:3.13-slim
WORKDIR /opt/jaxpp_flax
COPY pyproject.toml README.md LICENSE ./
COPY jaxpp_flax jaxpp_flax
COPY examples examples
RUN pip install --no-cache-dir .
RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
CMD ["python", "-m", "jaxpp_flax.doctor"]
