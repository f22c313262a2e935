#!/usr/bin/env bash
# llama.cpp behind its Python binding, in .peers/llama_cpp, built from source for this machine's CPU.
set -euo pipefail
source benchmarks/peers/environment.sh
new_environment llama_cpp
export CMAKE_ARGS="${CMAKE_ARGS:--DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release -DMTMD_BUILD=OFF -DLLAVA_BUILD=OFF}"
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
install --no-binary llama-cpp-python 'llama-cpp-python==0.3.36'
"$python" -c 'import llama_cpp; print("llama_cpp", llama_cpp.__version__, llama_cpp.llama_print_system_info().decode())'
