#!/usr/bin/env bash
# Makes the environments of the peers that benchmarks compare with: .peers/NAME, one each. What cannot be made leaves
# its reason in .peers/NAME.failed, for the benchmarks to list, and does not stop the others.
#
#     benchmarks/peers/make.sh [NAME ...]      those named, else all that are not there yet
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p .peers
failed=0

make_peer() {
    local name=$1 log=".peers/$1.log"
    echo "$name: making .peers/$name, log in $log" >&2
    rm -f ".peers/$name.failed" ".peers/$name/.installed"
    if bash "benchmarks/peers/$name.sh" > "$log" 2>&1; then
        touch ".peers/$name/.installed"
        echo "$name: ready: $(tail -n 1 "$log")" >&2
    else
        grep -v '^[[:space:]]*$' "$log" | tail -n 1 | cut -c 1-300 > ".peers/$name.failed"
        echo "$name: failed: $(cat ".peers/$name.failed")" >&2
        failed=1
    fi
}

if [ $# -gt 0 ]; then
    for name in "$@"; do make_peer "$name"; done
else
    for name in transformers vllm llama_cpp; do
        if [ -e ".peers/$name/.installed" ]; then
            echo "$name: there already, in .peers/$name" >&2
        else
            make_peer "$name"
        fi
    done
fi
exit "$failed"
