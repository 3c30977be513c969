#!/usr/bin/env bash
# Everything of the CUDA path, once, in stages, on a machine that has nothing but PyTorch:
#
#   benchmarks/gpu/first_light.sh OUT [WHEELS]      on one GPU, in under 9 minutes
#   DEVICE=cpu benchmarks/gpu/first_light.sh OUT    the same stages on a CPU, with small sizes
#
# OUT gets a log for each stage and what it measured, as soon as the stage ends; a stage that fails or takes
# too long does not end the others. BUDGET is the seconds of them all (530); a stage for which nothing is left is
# said to be left out. STAGES names those that are wanted, in words ("tests decode"); by default all. WHEELS is a folder of wheels that are installed for this run alone, beside
# what the machine's Python has: Ray, pydantic and what else is missing. The last lines are a table.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=$(mkdir -p "${1:?usage: first_light.sh OUT [WHEELS]}" && realpath "$1")
WHEELS=${2:-}
DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
if [ -n "$WHEELS" ]; then
  SITE=$(mktemp -d)
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$SITE" "$WHEELS"/*.whl || exit 1
  export PYTHONPATH="$SITE:$PYTHONPATH"
fi
LANES=$([ "$DEVICE" = cuda ] && echo gpu:1 || echo cpu:1)
SHORT=$([ "$DEVICE" = cuda ] || echo steps=2 warmup.steps=20)
SMALL=$([ "$DEVICE" = cuda ] || echo --quick)
RUNS=$(mktemp -d)
ROWS=()
ENDS=$((SECONDS + ${BUDGET:-530}))

stage() { # NAME SECONDS COMMAND...: run it, keep its log, note how it ended; LIMIT tells it its seconds
  local name=$1 limit=$2 began=$SECONDS left=$((ENDS - SECONDS)) code
  shift 2
  [[ " ${STAGES:-$name} " == *" $name "* ]] || return
  if [ $left -lt 10 ]; then
    ROWS+=("$(printf '%-16s       left out: no time' "$name")")
    return
  fi
  [ $left -lt "$limit" ] && limit=$left
  echo "== $name"
  LIMIT=$limit timeout -k 10 "$limit" "$@" >"$OUT/$name.log" 2>&1
  code=$?
  tail -n 12 "$OUT/$name.log"
  local word=done
  [ $code -eq 0 ] || word="failed ($code)"
  [ $code -ne 0 ] && [ $((SECONDS - began)) -ge "$limit" ] && word="longer than $limit s"
  ROWS+=("$(printf '%-16s %5d s  %s' "$name" $((SECONDS - began)) "$word")")
}

environment() {
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv 2>/dev/null
  "$PYTHON" -c "
import platform, torch
print('python', platform.python_version(), 'torch', torch.__version__, 'CUDA', torch.version.cuda)
for name in ('ray', 'transformers', 'pydantic', 'safetensors', 'm2flow'):
    try:
        print(name, getattr(__import__(name), '__version__', 'there'))
    except Exception as error:
        print(name, 'is missing:', error)
from m2flow.training import varlen
heads = torch.zeros(1, 2, 64, device='$DEVICE', dtype=torch.bfloat16)
print('the fused kernel of packed attention:', varlen.reason_against(heads, heads) or 'is there')
"
}
export -f environment
export PYTHON DEVICE

train() { # NAME OVERRIDES...
  local run="$RUNS/$1"
  shift
  "$PYTHON" -m m2flow train "$@" --run-dir "$run" --quiet &&
    "$PYTHON" - "$run" <<'P'
import json, sys
rows = [json.loads(line) for line in open(f"{sys.argv[1]}/metrics.jsonl")]
for row in (rows[0], rows[-1]):
    print({key: row[key] for key in sorted(row) if key.startswith(("eval/", "seconds", "throughput", "step", "reward/mean", "train/engine_gap"))})
P
}
export -f train

grpo_step() { # OPTIONS...: a side that takes too long is stopped early enough for its result to be written
  "$PYTHON" benchmarks/gpu/grpo_step.py "$@" --seconds $((LIMIT > 90 ? LIMIT - 60 : LIMIT / 3))
}
export -f grpo_step
export RUNS

stage environment 40 bash -c environment
stage tests 120 "$PYTHON" -m pytest -q -p no:cacheprovider -m "" tests/gpu
stage context_switch 60 "$PYTHON" benchmarks/gpu/context_switch.py --device "$DEVICE" $SMALL --out "$OUT/context_switch.json"
stage training 90 "$PYTHON" benchmarks/gpu/training.py --device "$DEVICE" $SMALL --out "$OUT/training.json"
if [ "$DEVICE" = cuda ]; then
  stage links 60 "$PYTHON" benchmarks/gpu/links.py --out "$OUT/links.json"
fi
stage decode 90 "$PYTHON" benchmarks/gpu/decode.py --device "$DEVICE" --quick --out "$OUT/decode.json"
stage long_tail 70 "$PYTHON" benchmarks/gpu/long_tail.py --device "$DEVICE" $SMALL --out "$OUT/long_tail.json"
stage grpo_step 275 bash -c "grpo_step --device $DEVICE $SMALL --out '$OUT/grpo_step.json'"
stage quickstart 180 bash -c "train quickstart recipes/quickstart.yaml lanes=$LANES $SHORT"
if "$PYTHON" -c "import mani_skill" 2>/dev/null; then
  stage maniskill 60 bash -c "train maniskill recipes/openvla-ppo-maniskill.yaml model=tiny steps=2 lanes=$LANES"
fi

rm -rf "$RUNS" ${SITE:+"$SITE"}
printf '\n%s\n' "stages:"
printf '%s\n' "${ROWS[@]}" | tee "$OUT/stages.txt"
