#!/usr/bin/env bash
# What a machine with a GPU is asked to show, in one script: the tests marked `cuda`, then the paired table in bfloat16 at
# T = 0 and T = 1. Results go under $OUT (default: docs/results/gpu). Needs the package installed with a CUDA build of torch.
#   DRY=1 benchmarks/gpu/run.sh     the same steps on the CPU, small: shows that the script itself works
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-docs/results/gpu}
python=${PYTHON:-python3}
mkdir -p "$out"
if [ -n "${DRY:-}" ]; then
  per_set=1 tokens=16 sets="--suite qa --suite gsm8k"
else
  per_set=10 tokens=128 sets=""
  "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available() and "no CUDA device: use DRY=1")'
fi
"$python" -m pytest tests/test_cuda.py -q 2>&1 | tee "$out/tests.log" | tail -1
for t in 0 1; do
  # shellcheck disable=SC2086  # $sets is some words or none
  "$python" -m dartspec bench run --dtype bfloat16 --nodes 59 --per-set "$per_set" --max-tokens "$tokens" $sets \
    --temperature "$t" --out "$out/table-t$t.json" >"$out/table-t$t.log" 2>&1
done
"$python" - "$out" <<'EOF'
import json, sys
for t in "01":
    r = json.load(open(f"{sys.argv[1]}/table-t{t}.json"))
    a, p = r["rows"][-1], r["provenance"]
    print(f"T={t}: speed-up {a['speed_up']}, M {a['M']}, equal {a['num_equal']}/{a['num_runs']}, {p['gpu'] or p['cpu']}")
EOF
