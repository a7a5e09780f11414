#!/usr/bin/env bash
# usage: benchmarks/gpu_try.sh JOBS AT_ONCE SECONDS
export PYTHONPATH=src:build/site PYTHONUNBUFFERED=1
python3 benchmarks/recipe_gpu.py "$1" "$OUT/rows.jsonl" --at-once "$2" --seconds "$3" > "$OUT/log.txt" 2>&1
tail -c 5000 "$OUT/log.txt"
