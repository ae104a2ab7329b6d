#!/bin/bash
# Makes the results of docs/reproduction.md again, all or those that are named, then the tables of all pages.
#
#     benchmarks/reproduce.sh                     # everything for which there is what it needs
#     benchmarks/reproduce.sh latency frontier    # some
#
# Needs (a part is left out, and says so, where its own is missing):
#   EXTRA        folder with alpaca.jsonl and codealpaca.jsonl as prompt sets (their licences keep them out of here)
#   EQUAL        folder with drafters trained on equal tokens: dart-equal, eagle3-equal, medusa-equal, hydra-equal
#   CORPUS_IDS   npz with ids and ends: token ids of a general corpus;  ANSWERS  JSONL with the target's own answers
#   LLAMA, GGUF  a Python with llama-cpp-python and gguf, and the Q4_1 file
# QUIET is put before what is timed, WORK before what is not (such as a lock of your machine). Captures lie in RUNS.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python} RUNS=${RUNS:-runs} OUT=docs/results
QUIET=${QUIET:-} WORK=${WORK:-}
INDEX=src/dartspec/assets/smollm2-135m-instruct/index.ngram
export OMP_NUM_THREADS=1
mkdir -p "$RUNS"
missing() { [ -n "${!1:-}" ] || { echo "left out: $2 needs $1" >&2; return 0; }; [ -z "${!1:-}" ]; }
methods() {
    echo --method dart --method auto --method prompt_lookup --method lookahead
    [ -z "${EQUAL:-}" ] || echo --method "$EQUAL/dart-equal,index=$INDEX" --method "$EQUAL/eagle3-equal" \
        --method "$EQUAL/medusa-equal" --method "$EQUAL/hydra-equal"
}
paper() {  # Table 1 at a temperature; six of the paper's seven tasks
    missing EXTRA "$1" || $QUIET "$PYTHON" -m dartspec bench run --suite mt_bench --suite humaneval --suite math500 \
        --suite mbpp --suite "$EXTRA/alpaca.jsonl" --suite "$EXTRA/codealpaca.jsonl" $(methods) --per-set 4 -n 96 \
        --temperature "$2" --threads 1 --out $OUT/"$1".json
}
paper-t0() { paper paper-t0 0; }
paper-t1() { paper paper-t1 1; }
latency() {
    $QUIET "$PYTHON" -m dartspec bench latency --rate 1,3,6 --requests 36 -n 64 --method auto@8 --method auto \
        --threads 1 --out $OUT/latency.json
}
bursts() {
    $QUIET "$PYTHON" -m dartspec bench latency --arrivals bursts:6 --rate 1 --requests 36 -n 64 --method auto@8 \
        --method auto --threads 1 --out $OUT/bursts.json
}
domain() {  # kinds of text, on an idle machine and beside two busy processes
    local n
    for n in 0 2; do
        $QUIET "$PYTHON" -m dartspec bench load --suite code --suite chat --suite math --suite prose \
            --suite identifiers --batch 1 --fixed 8 --temperature 0 --pairs 6 -n 48 --busy $n --threads 1 \
            --out $OUT/domain-busy-$n.json
    done
}
guesses() {
    [ -f "$RUNS/guesses.safetensors" ] || $WORK "$PYTHON" -m dartspec bench capture --drafter dart --temperature 0,1 \
        --seed 0,1,2 --per-set 4 -n 96 --threads 1 --out "$RUNS/guesses.safetensors"
}
factorial() { guesses; $WORK "$PYTHON" benchmarks/experiments.py factorial "$RUNS/guesses.safetensors" --out $OUT/factorial.json; }
ngram() {  # Table 2: the n-gram term off and on, set by set
    guesses
    $WORK "$PYTHON" benchmarks/experiments.py ngram "$RUNS/guesses.safetensors" --out $OUT/ngram-off-on.json
}
budget() {
    guesses
    $QUIET "$PYTHON" benchmarks/experiments.py budget "$RUNS/guesses.safetensors" --run $OUT/table-t0.json --measure \
        --out $OUT/budget.json
}
frontier() {
    guesses
    missing CORPUS_IDS frontier || missing ANSWERS frontier || $QUIET "$PYTHON" benchmarks/experiments.py frontier \
        "$RUNS/guesses.safetensors" --corpus-ids "$CORPUS_IDS" --answers "$ANSWERS" --run $OUT/table-t0.json \
        --out $OUT/frontier.json
}
horizon() {
    "$PYTHON" benchmarks/experiments.py deep "$RUNS/deep16" --horizon 16
    [ -f "$RUNS/deep.safetensors" ] || $WORK "$PYTHON" -m dartspec bench capture --drafter "$RUNS/deep16" --per-set 4 \
        -n 96 --threads 1 --out "$RUNS/deep.safetensors"
    $QUIET "$PYTHON" benchmarks/experiments.py horizon "$RUNS/deep.safetensors" --run $OUT/table-t0.json \
        --out $OUT/horizon.json
}
draft-length() {
    missing EQUAL draft-length || $QUIET "$PYTHON" benchmarks/draft_length.py --eagle3 "$EQUAL/eagle3-equal" \
        --prompts 3 --max-tokens 32 --out $OUT/draft-length.json
}
outside() {  # without --no-compiled the static form compiles anew for each length of a prompt, for minutes
    missing LLAMA outside || missing GGUF outside || $QUIET "$PYTHON" benchmarks/outside.py --llama-python "$LLAMA" \
        --gguf "$GGUF" --prompts 4 --max-tokens 48 --no-compiled --out $OUT/outside.json
}
for part in ${*:-paper-t0 paper-t1 latency bursts domain factorial ngram budget frontier horizon draft-length outside}; do
    echo "== $part"
    "$part"
done
"$PYTHON" benchmarks/write_tables.py
