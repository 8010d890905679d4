# Runs a student's ranks: Python, torch, numpy, safetensors, and no compiler. On a CUDA base torch is there already.
ARG BASE=nvcr.io/nvidia/pytorch:25.06-py3
FROM ${BASE}
ENV DEBIAN_FRONTEND=noninteractive
RUN command -v python3 >/dev/null && command -v pip3 >/dev/null || { \
      apt-get update \
   && apt-get install --yes --no-install-recommends coreutils tar python3 python3-pip libgomp1 \
   && rm -rf /var/lib/apt/lists/*; }
# Wheels are fetched outside: inside an image the certificates of the machine's own index may be missing.
COPY wheels /wheels
RUN pip3 install --no-cache-dir --no-index --find-links /wheels --break-system-packages torch numpy safetensors \
 && rm -rf /wheels
