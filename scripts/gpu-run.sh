#!/usr/bin/env bash
# Checks the crate on a machine with a GPU: run.sh [OUT] [STEP...]
#
# Lies in the folder that scripts/gpu-check.sh has built, with all that it needs but a CUDA 13 driver and
# CUDA's libraries. Those come from LD_LIBRARY_PATH, or from the Python packages that PyTorch's wheels
# bring. PYTHON, python3 by default, is the one whose PyTorch is measured beside the crate.
#
# Steps are lib, it, bench and cifar10, for each set of features; all of them, unless some are named.
# FEATURES=cudnn, say, leaves the other sets out.
# BENCH_OPTIONS goes to the benchmark; CIFAR10 is a folder of that data set, without which the example
# only shows that it runs. No step takes more than SECONDS_A_STEP (600). Output goes to OUT (./out) too,
# a file a step. All steps run, whatever became of those before; the exit status says whether one failed.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:-out}
shift || true
steps=("$@")
((${#steps[@]})) || steps=(lib it bench cifar10)
python=${PYTHON:-python3}
seconds=${SECONDS_A_STEP:-600}
mkdir -p "$out" || exit
out=$(cd "$out" && pwd)

if [[ ! -d $here/bin ]]; then
    # Moved into place, so that what is there is whole. Python unpacks where tar has no xz.
    unpacked=$(mktemp -d "$here/unpacked.XXXXXX") || exit
    trap 'rm -rf "$unpacked"' EXIT
    tar -C "$unpacked" -xJf "$here/bin.tar.xz" ||
        "$python" -m tarfile -e "$here/bin.tar.xz" "$unpacked" || exit
    mv "$unpacked/bin" "$here/bin" || exit
fi

# One folder a package: nvidia/cublas/lib, nvidia/cu13/lib and so on.
packages=$("$python" -c '
import glob, importlib.util
spec = importlib.util.find_spec("nvidia")
roots = spec.submodule_search_locations if spec else []
print(":".join(sorted(lib for root in roots for lib in glob.glob(f"{root}/*/lib"))))')
export LD_LIBRARY_PATH=$packages${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export RUST_BACKTRACE=1 REQUIRE_CUDA=1

failed=() table=""

step() { # name, seconds at most, command...
    local name=$1 most=$2 start=$SECONDS status=0
    shift 2
    printf '\n=== %s\n' "$name"
    timeout --kill-after=10 "$most" "$@" 2>&1 | tee "$out/$name.log" || status=$?
    ((status == 0)) || failed+=("$name")
    table+=$(printf '%8d  %6d  %s' $((SECONDS - start)) "$status" "$name")$'\n'
}

machine() {
    nvidia-smi
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,mig.mode.current \
        --format=csv
    "$python" -c 'import torch; print("PyTorch", torch.__version__, "CUDA", torch.version.cuda)'
    local program
    for program in "$here"/bin/*/*; do
        ldd "$program" | grep "not found" | sed "s|^|$program:|"
    done
    nproc
}

export here python
export -f machine
step machine 60 bash -c machine
# What programs read lies where it does in the repository; CARGO_MANIFEST_DIR says where that is.
for variant in "$here"/bin/${FEATURES:-*}; do
    features=${variant##*/}
    for name in "${steps[@]}"; do
        case $name in
            # Rules for the repository, which is not here.
            it) run=(env "CARGO_MANIFEST_DIR=$here" "$variant/it" --skip tidy::) ;;
            lib) run=(env "CARGO_MANIFEST_DIR=$here" "$variant/lib") ;;
            bench)
                run=(env "CARGO_MANIFEST_DIR=$here/benches" "$variant/gpu" --python "$python"
                    --json "$out/bench-$features.json")
                # shellcheck disable=SC2206 # options, as one types them
                run+=(${BENCH_OPTIONS:-}) ;;
            cifar10)
                run=("$python" "$here/cifar10-table.py" --program "$variant/cifar10"
                    --json "$out/cifar10-$features.json" --gpu)
                if [[ -n ${CIFAR10:-} ]]; then run+=(--data "$CIFAR10"); else run+=(--smoke); fi ;;
            *) echo "no step $name" >&2 && exit 2 ;;
        esac
        step "$name-$features" "$seconds" "${run[@]}"
    done
done

printf '\n%8s  %6s  step\n%s' seconds status "$table" | tee "$out/summary.log"
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}" | tee -a "$out/summary.log"; exit 1; }
