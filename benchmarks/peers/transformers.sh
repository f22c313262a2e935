#!/usr/bin/env bash
# transformers 5.24 on torch, in .peers/transformers.
set -euo pipefail
source benchmarks/peers/environment.sh
new_environment transformers
install "$torch_requirement" 'transformers==5.24.*' 'accelerate>=1.1'
"$python" -c 'import torch, transformers; print("transformers", transformers.__version__, "torch", torch.__version__)'
