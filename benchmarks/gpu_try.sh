#!/usr/bin/env bash
# usage: benchmarks/gpu_try.sh FOLDER
export PYTHONPATH=src:build/site:tests PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
base="python3 -m thinwire bench recipe --simulate --device cuda --model gpt:layers=6,width=384,heads=6,context=128,bias=1"
run() { name=$1; shift; timeout 100 $base "$@" --out $OUT/$name.jsonl > $OUT/$name.log 2>&1; echo "$name exit $?" >> $OUT/$name.log; }
run a --bf16 --workers 8 --batch 8 --steps 60 --recipes "adamw thinwire" "adamw dense" "adamw powersgd rank 4" &
run b --bf16 --workers 32 --batch 2 --steps 30 --recipes "adamw thinwire" &
run c --bf16 --workers 2 --batch 32 --steps 60 --recipes "adamw dense" "adamw thinwire" &
wait
for name in a b c; do echo "== $name"; grep -v "^ *$" $OUT/$name.log | tail -18 | cut -c1-220; grep -h '"recipe"' $OUT/$name.jsonl | cut -c1-60; grep -ho '"seconds": [0-9.]*' $OUT/$name.jsonl; done
if grep -q "exit 1" $OUT/a.log; then
    CUDA_LAUNCH_BLOCKING=1 timeout 60 $base --workers 8 --batch 8 --steps 3 --recipes "adamw thinwire" 2>&1 | tail -15 | cut -c1-250
fi
timeout 60 python3 tests/gpu/test_local_world_cuda.py 2>&1 | tail -3
