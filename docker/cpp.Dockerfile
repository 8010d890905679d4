# Two images for the C++ track: `run` has no compiler and runs what `build` has built.
# The default base is the one that the homework's deployment page recommends; CPU machines pass a Debian base.
ARG BASE=nvcr.io/nvidia/pytorch:25.06-py3

FROM ${BASE} AS run
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
 && apt-get install --yes --no-install-recommends \
        coreutils tar python3-minimal libpython3-stdlib \
        libstdc++6 libgomp1 'libgoogle-glog0v6*' 'libgflags2.2*' \
 && rm -rf /var/lib/apt/lists/*

FROM run AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends \
        g++ cmake ninja-build make ccache mold \
        libgoogle-glog-dev libgflags-dev libgtest-dev libeigen3-dev \
 && rm -rf /var/lib/apt/lists/*
COPY shims /opt/third_party
RUN ln -s /usr/include/eigen3/Eigen /usr/include/eigen3/unsupported /opt/third_party/eigen/
# Most of a file's build is parsing these system headers. The flags must be those of the homework's build file.
COPY pch /opt/pch
# The compile cache goes by the sums: it would read these large files for every source.
RUN for name in system testing; do \
      g++ -std=c++20 -fopenmp -isystem /usr/include/eigen3 -x c++-header /opt/pch/$name.h -o /opt/pch/$name.h.gch \
   && sha256sum /opt/pch/$name.h.gch | cut -d" " -f1 > /opt/pch/$name.h.gch.sum || exit 1; \
    done
