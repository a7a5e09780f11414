#!/usr/bin/env bash
# usage: benchmarks/gpu_try.sh FOLDER JOBS AT_ONCE SECONDS
export PYTHONPATH=src:build/site PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader; nproc
for world in 8 32; do
    python3 -m thinwire bench recipe --simulate --device cuda --bf16 --model gpt:layers=6,width=384,heads=6,context=128,bias=1 \
        --workers $world --batch $((128 / world)) --steps 40 --recipes "adamw thinwire" "adamw dense" 2>&1 | tail -12
done
python3 benchmarks/recipe_gpu.py "$2" "$1/rows.jsonl" --at-once "$3" --seconds "$4"
