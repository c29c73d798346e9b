#!/usr/bin/env bash
# A small Llama, from a plan to generated text, on two processes of this machine. Every step is a command that you can
# type yourself; each demo makes a run folder of its own: demo.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."

run=${1:-runs/demo-$(date +%Y%m%d-%H%M%S)}
source=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')

say() { printf '\n\033[1m%s\033[0m\n' "$1"; }
show() { printf '\033[2m$ %s\033[0m\n' "$*"; "$@"; }

say "1. A plan: what two processes will do, written to a file"
show meshwright plan examples/stdlib.toml --data.source "$source" --run.folder "$run" --out "$run/plan.toml"

say "2. Proof: the plan computes what one device computes, every gradient and parameter, in float64"
show meshwright verify "$run/plan.toml"

say "3. Training on the source text of Python's standard library: about two minutes"
show meshwright train "$run/plan.toml"

say "4. Back to an earlier checkpoint: the last steps, played again, come out the same to the last bit"
earlier=$(ls "$run/checkpoints" | grep -E '^step-[0-9]+$' | tail -2 | head -1)
show meshwright train "$run/plan.toml" --from-step "$((10#${earlier#step-}))" --run.sample_tokens 0

say "Everything lies in $run"
printf "  %s\n" "$run"/*
