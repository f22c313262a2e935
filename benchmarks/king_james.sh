#!/bin/sh
# From nothing to a model of 2.6 M parameters in under ten minutes on two cores, two ranks; OUTPUT is a new directory.
# A tenth of the chapters is held out; metrics.jsonl and loss.png show how it went.
set -eu
PYTHON=${PYTHON:-.venv/bin/python}
"$PYTHON" -m launch train --config benchmarks/king_james.json --train-tokenizer 1024 \
    --data benchmarks/data/king-james-bible.txt --eval-fraction 0.1 --output "${1:?usage: king_james.sh OUTPUT}" \
    --tp 2 --device cpu --dtype float32 --sequence-length 256 --batch-size 8 --steps "${STEPS:-400}" \
    --learning-rate 0.003 --evaluate-every 100 --keep 1
