#!/bin/sh
# The two commands of the README in a clone of the last commit, with an empty environment and an empty home: what a
# newcomer meets. Only PATH and pip's own settings (PIP_*) are passed on.
set -eu
repository=$(git rev-parse --show-toplevel)
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
git clone --quiet "$repository" "$directory/clone"
mkdir "$directory/home"
cd "$directory/clone"
pip_settings=$(env | grep '^PIP_' || true)
# shellcheck disable=SC2086  # one word a variable: none of pip's has spaces
for target in demo test; do
    env -i PATH="$PATH" HOME="$directory/home" $pip_settings make "$target"
done
