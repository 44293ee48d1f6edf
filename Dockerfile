# SPDX-License-Identifier: Apache-2.0
# TenCache with one or more NVIDIA GPUs: docker build -t tencache .   (see docs/containers.md)
# The image with the compiler: DeepSpeed compiles its own operators at their first use.
ARG BASE=pytorch/pytorch:2.9.1-cuda12.8-cudnn9-devel
FROM ${BASE}

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ libaio-dev \
    && rm -rf /var/lib/apt/lists/*

# Before the sources, so that a change to them does not install these again. torch stays the image's.
RUN pip install --no-cache-dir 'deepspeed>=0.16.4,<0.20' 'setuptools>=77' ninja

COPY . /opt/tencache
RUN TENCACHE_BUILD_OPS=1 pip install --no-cache-dir --no-build-isolation '/opt/tencache[bench]'

WORKDIR /workspace
