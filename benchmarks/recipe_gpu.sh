#!/usr/bin/env bash
# Trainings by `thinwire bench recipe` on one GPU, several at a time.
# usage: [MODEL=SPEC] [SEED=0] benchmarks/recipe_gpu.sh FOLDER STEPS AT_ONCE < lines of "WORKERS|BATCH|WARMUP STEPS|RECIPE"
set -u
out=$1 steps=$2 at_once=$3
model=${MODEL:-gpt:layers=6,width=384,heads=6,context=128,bias=1}
export PYTHONPATH=src:${PYTHONPATH:-} OMP_NUM_THREADS=2 NVIDIA_TF32_OVERRIDE=1
number=0
while IFS='|' read -r workers batch warmup recipe; do
    number=$((number + 1))
    python3 -m thinwire bench recipe --simulate --device cuda --model "$model" --workers "$workers" --batch "$batch" \
        --steps "$steps" --warmup-steps "$warmup" --seeds "${SEED:-0}" --recipes "$recipe" \
        --out "$out/run$number.jsonl" > "$out/run$number.log" 2>&1 &
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do sleep 0.5; done
done
wait
grep -h '"loss"' "$out"/run*.jsonl
