#!/usr/bin/env bash
# Checks the crate on a machine with a GPU, in three calls that each end within ten minutes:
#
#   run.sh tests [OUT]     the tests; those that failed, each by itself; compute-sanitizer
#   run.sh gpt2 [OUT]      the benchmark: GPT-2, operators, passes over all parameters
#   run.sh resnets [OUT]   the benchmark: ResNets; the cifar10 example in F32, F16 and BF16, and in PyTorch
#
# What torch.compile takes a minute each to compile comes last.
#
# Lies in the folder that scripts/gpu-check.sh has built, with all that it needs but a CUDA 13 driver and
# CUDA's libraries. Those come from LD_LIBRARY_PATH, or from the Python packages that PyTorch's wheels
# bring. PYTHON, python3 by default, is the one whose PyTorch is measured beside the crate; where it has none, the crate is
# measured alone.
#
# OUT (./out) gets two files, CALL.tar.gz with all output and CALL.txt, the summary that also ends this
# output. Both are written anew after each step, so that a call that is cut short leaves what it has.
# A call takes at most SECONDS_A_CALL (560), whatever its steps do, and each step its share of that: what there is no
# time for is listed. All steps run, whatever became of those before; the exit status says whether one failed or had no time.
#
# FEATURES ("cudnn cuda") are the variants, the first the most thorough. TESTS, words, leaves out the tests whose names have
# none of them. BENCH_OPTIONS goes to the benchmark; CIFAR10 is a folder with all of that data set, without which the
# example draws its images. SMOKE=1 has benchmark and example do little, to see that they run. Compiled kernels are kept in
# CANDLE_AMP_CACHE, beside this script unless said otherwise. A group of rows that takes longer than SECONDS_A_GROUP (120) is
# given up; of a shorter call, after its share of that. CANDLE_AMP_LINEINFO=1 has compute-sanitizer name lines.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
call=${1:-}
[[ $call =~ ^(tests|gpt2|resnets)$ && $# -le 2 ]] || { sed -n '2,/^[^#]/s/^# \?//p' "$0" >&2 && exit 2; }
mkdir -p "${2:-out}" || exit
out=$(cd "${2:-out}" && pwd)
python=${PYTHON:-python3}
in_all=${SECONDS_A_CALL:-560}
logs=$(mktemp -d) || exit
trap 'rm -rf "$logs"' EXIT

if [[ ! -d $here/bin ]]; then
    # Moved into place, so that what is there is whole. Python unpacks where tar has no xz.
    unpacked=$(mktemp -d "$here/unpacked.XXXXXX") || exit
    tar -C "$unpacked" -xJf "$here/bin.tar.xz" ||
        "$python" -m tarfile -e "$here/bin.tar.xz" "$unpacked" || exit
    for part in cache bin; do [[ ! -d $unpacked/$part ]] || mv "$unpacked/$part" "$here/$part" || exit; done
    rmdir "$unpacked"
fi

# One folder a package: nvidia/cublas/lib, nvidia/cu13/lib and so on.
packages=$("$python" -c '
import glob, importlib.util
spec = importlib.util.find_spec("nvidia")
roots = spec.submodule_search_locations if spec else []
print(":".join(sorted(lib for root in roots for lib in glob.glob(f"{root}/*/lib"))))')
export LD_LIBRARY_PATH=$packages${LD_LIBRARY_PATH:+${packages:+:}$LD_LIBRARY_PATH}
export RUST_BACKTRACE=1 REQUIRE_CUDA=1
export CANDLE_AMP_CACHE=${CANDLE_AMP_CACHE-$here/cache}

bad=0 table=""

# What there is so far, to OUT.
save() {
    { printf '%8s  %6s  %s\n' seconds status step; printf '%s' "$table"; } >"$logs/summary.txt"
    cp "$logs/summary.txt" "$out/$call.txt"
    tar -C "$logs" -czf "$out/$call.new" . && mv "$out/$call.new" "$out/$call.tar.gz"
}

note() { # seconds, status, name
    table+=$(printf '%8s  %6s  %s' "$@")$'\n'
    save
}

# Runs a command for so many seconds of 560, or as many as are left; output goes to the name's log.
step() { # name, seconds at most, command...
    local name=$1 most=$(($2 * in_all / 560)) start=$SECONDS left=$((in_all - SECONDS)) status=0
    shift 2
    ((most >= 5)) || most=5
    ((left >= most)) || most=$left
    ((most >= 5)) || { bad=1 && note - - "$name: no time left" && return 1; }
    printf '\n=== %s\n' "$name"
    timeout --kill-after=5 "$most" "$@" >"$logs/$name.log" 2>&1 || status=$?
    tail -n "${LINES_SHOWN:-40}" "$logs/$name.log"
    ((status == 0)) || bad=1
    note $((SECONDS - start)) "$status" "$name"
    return "$status"
}

machine() {
    nvidia-smi
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,mig.mode.current \
        --format=csv
    "$python" -c 'import torch; print("PyTorch", torch.__version__, "CUDA", torch.version.cuda)'
    nproc
    local program missing
    missing=$(for program in "$here"/bin/*/*; do
        ldd "$program" | grep "not found" | sed "s|^|$program:|"
    done)
    [[ -z $missing ]] || { echo "$missing" && return 1; }
}

# An illegal access spoils the device for every later test of its process. So each test that failed, or that a process
# which died never came to, runs once more by itself, several at once, and all of them in a seventh of the call.
one_by_one() { # name of the step that failed, program, options...
    local name=$1 program=$2 log=$logs/$1.log most=$((in_all / 7)) status test again=() ok=0 ran=0
    shift 2
    [[ -e $log ]] || return # it had no time
    mapfile -t again < <(comm -23 <(timeout 10 "$program" --list "$@" 2>/dev/null | sed -n 's/: test$//p' | sort) \
        <(sed -n 's/^test \(.*\) \.\.\. \(ok\|ignored.*\)$/\1/p' "$log" | sort))
    ((in_all - SECONDS >= most)) || most=$((in_all - SECONDS))
    : >"$logs/$name-alone.txt"
    ((${#again[@]} == 0)) || printf '%s\0' "${again[@]}" |
        timeout --kill-after=5 "$((most > 1 ? most : 1))" xargs -0 -r -P 8 -I{} bash -c 'alone "$@"' _ "$name" "$program" {}
    while read -r status test; do
        ran=$((ran + 1))
        if ((status == 0)); then ok=$((ok + 1)); else bad=1; fi
        # Saved once for all: there may be a thousand.
        table+=$(printf '%8s  %6s  %s' - "$status" "$name-alone-${test//:/_}")$'\n'
        ((status == 0)) || tail -n 15 "$logs/$name-alone-${test//:/_}.log"
    done < <(sort "$logs/$name-alone.txt")
    note - - "$name: of ${#again[@]} tests that did not pass, $ok pass alone, and $((${#again[@]} - ran)) had no time"
}

# Runs a test by itself, and adds its status to the list of them. In the foreground, so that it ends with all of them.
alone() { # name of the step that failed, program, test
    local status=0
    timeout --foreground --kill-after=5 60 "$2" --exact "$3" --nocapture >"$logs/$1-alone-${3//:/_}.log" 2>&1 || status=$?
    echo "$status $3" >>"$logs/$1-alone.txt"
}

tests() { # variant's folder, lib or it, seconds at most
    local name=$2-${1##*/} options=("${wanted[@]}")
    # Rules for the repository, which is not here.
    [[ $2 != it ]] || options+=(--skip tidy::)
    step "$name" "$3" "$1/$2" "${options[@]}" || one_by_one "$name" "$1/$2" "${options[@]}"
}

# All at once, as each keeps one core and little of the GPU busy. An H200 took 27 to 51 seconds each for memcheck of the first
# three filters, and more than 170 for the last one: what does not end in time is no fault.
sanitize() { # variant's folder, seconds at most, tools...
    local program=$1/lib most=$(($2 * in_all / 560)) tool filter pairs=() names=() name line
    shift 2
    PATH=$PATH:/usr/local/cuda/bin # where CUDA's packages put it
    command -v compute-sanitizer >/dev/null || { note - - "compute-sanitizer is not installed" && return; }
    for tool; do
        for filter in kernels::attention kernels::multi_tensor kernels::batch_norm kernels::conv::tests::gpus; do
            pairs+=("$tool" "$filter") names+=("$tool-${filter//:/_}")
        done
    done
    ((most >= 5)) || most=5
    ((in_all - SECONDS >= most)) || most=$((in_all - SECONDS))
    ((most >= 5)) || { bad=1 && note - - "compute-sanitizer: no time left" && return; }
    : >"$logs/sanitized.txt"
    printf '%s\0' "${pairs[@]}" |
        timeout --kill-after=5 "$most" xargs -0 -n 2 -P 12 bash -c 'sanitized "$@"' _ "$program"
    names=("${names[@]/#/$logs/}")
    if grep -qis "device not supported" "${names[@]/%/.log}"; then
        note - - "compute-sanitizer does not support this device" && return
    fi
    for name in "${names[@]##*/}"; do
        line=$(grep " $name\$" "$logs/sanitized.txt" || echo "$most 124 $name")
        [[ $line == *" 0 $name" || $line == *" 124 $name" ]] || {
            bad=1
            printf '\n=== %s\n' "$name"
            tail -n "${LINES_SHOWN:-40}" "$logs/$name.log"
        }
        # shellcheck disable=SC2086
        note $line
        ! grep -qsE '^(running )?0 tests' "$logs/$name.log" || { bad=1 && note - 1 "$name: no test has that name"; }
    done
}

# A tool on the tests of a filter. What the driver and libraries answer is asked for, as memory that is no longer there: not
# reported.
sanitized() { # program, tool, filter
    local name=$2-${3//:/_} status=0 start=$SECONDS
    compute-sanitizer --tool "$2" --report-api-errors no --error-exitcode 9 --target-processes all "$1" "$3" \
        >"$logs/$name.log" 2>&1 || status=$?
    echo "$((SECONDS - start)) $status $name" >>"$logs/sanitized.txt"
}

# Ranks that share the GPU, which NCCL allows from 2.30 on. It says so where it does not.
nccl() {
    [[ -x $here/bin/nccl/lib ]] || { note - - "nccl: was not built" && return; }
    step nccl 60 env NCCL_MULTI_RANK_GPU_ENABLE=1 "$here/bin/nccl/lib" --nocapture dist::nccl
    ! grep -qs '^skipped: ' "$logs/nccl.log" || note - - "nccl: $(grep -m1 '^skipped: ' "$logs/nccl.log")"
}

# PyTorch's side, where there is one. One that cannot be loaded is a failure, and takes no row of the crate's along.
find_torch() {
    local status=0
    torch=(--python "$python")
    timeout 60 "$python" -c '
import sys
try:
    import torch
except ModuleNotFoundError as error:
    sys.exit(3 if error.name == "torch" else 1)' >"$logs/import-torch.log" 2>&1 || status=$?
    ((status != 0)) || return 0
    torch=()
    ((status != 3)) || { note - - "PyTorch is not there: the crate is measured alone" && return; }
    bad=1
    note - "$status" "PyTorch cannot be loaded: the crate is measured alone"
    cat "$logs/import-torch.log"
}

# Rows that end the process, or spoil the device for it, do not take those after them along: another process goes on.
benchmark() { # part, seconds at most, options...
    local part=$1 most=$2 begun=$SECONDS left=$2 before="" next="" again="" options
    shift 2
    read -ra options <<<"${BENCH_OPTIONS:-$*}"
    while ((left > 0)); do
        LINES_SHOWN=300 step "bench-$part$again" "$left" env "CARGO_MANIFEST_DIR=$here/benches" "$best/gpu" \
            "${torch[@]}" --part "$part" --json "$logs/bench-$part.json" --progress "$logs/bench-$part.next" \
            --group-seconds "$((${SECONDS_A_GROUP:-120} * in_all / 560))" "${options[@]}" "${smoke[@]}"
        before=$next
        next=$(cat "$logs/bench-$part.next" 2>/dev/null)
        [[ $next != end && $next != "$before" && $next != 0 ]] || return
        again=-after-$next
        left=$((most - (SECONDS - begun) * 560 / in_all))
    done
}

cifar10() {
    local data=()
    [[ -z ${CIFAR10:-} ]] || data=(--data "$CIFAR10")
    # As its twin: F32 variables, channels last.
    step cifar10 120 "$python" "$here/cifar10-table.py" --program "$best/cifar10" --seeds 1 --gpu --autocast \
        --channels-last --json "$logs/cifar10.json" "${data[@]}" "${small[@]}"
    ((${#torch[@]})) || return 0
    # The same run in PyTorch, for its times; with SMOKE=1 another one, to see that it works.
    step cifar10-torch 40 "$python" "$here/benches/gpu/cifar10_twin.py" --json "$logs/cifar10-torch.json" "${smoke[@]}"
    step cifar10-torch-compiled 90 "$python" "$here/benches/gpu/cifar10_twin.py" --compile \
        --json "$logs/cifar10-torch-compiled.json" "${smoke[@]}"
}

export here python logs
export -f machine alone sanitized
read -ra variants <<<"${FEATURES:-cudnn cuda}"
read -ra wanted <<<"${TESTS:-}"
smoke=() small=() # of the example, a smaller network and fewer steps than its own --smoke
[[ ${SMOKE:-0} != 1 ]] || smoke=(--smoke) small=(--smoke --model resnet8 --steps 2)
best=$here/bin/${variants[0]}
# What programs read lies where it does in the repository; CARGO_MANIFEST_DIR says where that is.
export CARGO_MANIFEST_DIR=$here
step machine 60 bash -c machine
[[ $call == tests ]] || find_torch
case $call in
    tests)
        # What says most of an illegal access comes before what there may be no time for.
        tests "$best" lib 170
        sanitize "$best" 130 memcheck racecheck synccheck
        tests "$best" it 100
        nccl
        for variant in "${variants[@]:1}"; do
            for name in lib it; do tests "$here/bin/$variant" "$name" 150; done
        done ;;
    gpt2)
        benchmark gpt2 150 --seconds 0.2
        benchmark passes 110 --seconds 0.2
        # 146 of them, each in turns with PyTorch's.
        benchmark operators 200 --seconds 0.1 --rounds 2
        benchmark gpt2-compiled 560 --seconds 0.2 ;;
    resnets)
        benchmark resnets 240 --seconds 0.2
        cifar10
        benchmark resnets-compiled 560 --seconds 0.2 ;;
esac

printf '\n' && cat "$out/$call.txt"
exit "$bad"
