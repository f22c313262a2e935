# Sourced by the scripts beside it: makes and enters one environment under .peers/.

# new_environment NAME: an empty environment .peers/NAME; leaves its interpreter in $python.
new_environment() {
    "${PYTHON:-python3}" -m venv --clear ".peers/$1"
    python=".peers/$1/bin/python"
    "$python" -m pip install --disable-pip-version-check --quiet 'pip>=22'
}

# install ARGUMENT...: pip, in the environment that was entered last.
install() {
    "$python" -m pip install --disable-pip-version-check --quiet "$@"
}

# The upper bound lets pip take a CPU build that is at hand, instead of a newer CUDA build of several gigabytes.
torch_requirement='torch>=2.9,<2.14'
