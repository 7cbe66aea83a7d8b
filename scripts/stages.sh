#!/usr/bin/env bash
# Run make targets one after the other, print each one's time, stop at the first that fails.
set -uo pipefail
cd "$(dirname "$0")/.."
summary=""
began=$SECONDS
code=0
for stage in "$@"; do
  echo "=== $stage"
  start=$EPOCHREALTIME
  make --no-print-directory "$stage"
  code=$?
  took=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
  outcome=ok
  if [ "$code" -ne 0 ]; then outcome="FAILED ($code)"; fi
  echo "=== $stage: $outcome in $took s"
  summary+=$(printf '%-20s %8s s  %s' "$stage" "$took" "$outcome")$'\n'
  if [ "$code" -ne 0 ]; then break; fi
done
printf '=== stages\n%s%-20s %8s s\n' "$summary" total "$((SECONDS - began))"
exit "$code"
