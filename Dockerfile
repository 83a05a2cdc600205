# The service, with the CUDA libraries from PyPI: the host needs the driver and the NVIDIA container
# toolkit alone. CUDA=12 runs on drivers from 525 on, CUDA=13 from 580 on.
#
#   docker build --build-arg CUDA=13 -t matmuld .
#   docker run --gpus all -p 127.0.0.1:8000:8000 matmuld
#
# Without --gpus it serves from the CPU. Flags of `matmuld serve` may follow the image's name. It
# listens on every address of the container and asks nobody who they are: publish the port on
# loopback, or to those alone who may use the device.

FROM python:3.12-slim AS build
ARG CUDA=12
RUN python -m venv /opt/matmuld
ENV PATH=/opt/matmuld/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src

# The CUDA libraries, gigabytes of them, in a layer that only a change of pyproject.toml renews.
COPY pyproject.toml ./
RUN python -c "import tomllib; \
        project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        print(*project['optional-dependencies']['cuda${CUDA}'], sep='\n')" > cuda.txt \
    && pip install -r cuda.txt

COPY . .
RUN pip install ./clients/python ".[cuda${CUDA}]"


FROM python:3.12-slim
COPY --from=build /opt/matmuld /opt/matmuld
# CuPy keeps the kernels that it compiles in the home directory.
# The plan store is in its .cache: -v matmuld:/home/matmuld/.cache keeps it.
RUN useradd --create-home --uid 10001 matmuld \
    && install -d -o matmuld -g matmuld /run/matmuld /home/matmuld/.cache
USER matmuld
ENV PATH=/opt/matmuld/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    MATMULD_LISTEN=http://0.0.0.0:8000
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", "\
import http.client, sys; \
service = http.client.HTTPConnection('127.0.0.1', 8000, timeout=4); \
service.request('GET', '/health/live'); \
sys.exit(service.getresponse().status != 200)"]
ENTRYPOINT ["matmuld", "serve"]
