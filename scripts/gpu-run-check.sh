#!/usr/bin/env bash
# Rehearses scripts/gpu-run.sh, whose real run needs a GPU. Says what is wrong, and fails.
#
#   gpu-run-check.sh          with programs that stand in for the tests: one that dies, one that hangs
#   gpu-run-check.sh --real   with the folder that gpu-check.sh builds, on the emulated GPU
#
# --real takes a quarter of an hour where nothing is built. It unpacks the folder and makes the three calls, each within ten
# minutes. Where namespaces may be created, as root may, there is no checkout, no toolchain and no network then; elsewhere it
# says so. Rows have to stand beside PyTorch if PYTHON has that. TESTS are those that read files or start programs, and
# GPU_CHECK_FEATURES is "cudnn", unless said otherwise. OUT keeps what the calls leave.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Whether what the calls leave can be fetched: 8 files of 16 MiB.
files_fit() { # folder
    [[ -d $1 ]] && (($(find "$1" -type f | wc -l) <= 8)) && [[ -z $(find "$1" -type f -size +16M) ]]
}

# The calls, in a place of their own.
real() {
    export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target} GPU_CHECK_FEATURES=${GPU_CHECK_FEATURES:-cudnn}
    GPU_CHECK_EMULATED=1 scripts/gpu-check.sh build "$folder/travels"
    # What that machine has: CUDA's libraries, of which the emulated ones need their headers; and its tools.
    mkdir -p "$folder"/cuda/tools
    cp -r "$CARGO_TARGET_DIR"/emulated-gpu/{lib,device,include,cache} "$folder/cuda"
    printf '#!/usr/bin/env bash\necho "Emulated GPU"\n' >"$folder/cuda/tools/nvidia-smi"
    # Shows only that there are such tests: what they do on the emulated GPU is checked elsewhere.
    printf '#!/usr/bin/env bash\nwhile [[ $1 != */lib ]]; do shift; done\nexec "$1" --list "$2"\n' \
        >"$folder/cuda/tools/compute-sanitizer"
    # The programs are to find the emulated libraries, and no package of real ones; PyTorch is not to find them.
    cat >"$folder/cuda/tools/python" <<'END'
#!/usr/bin/env bash
case "$*" in
    *find_spec*) exit ;;
    *torch* | *twin*) unset LD_LIBRARY_PATH && export OMP_NUM_THREADS=1 ;;
esac
exec "$REAL_PYTHON" "$@"
END
    chmod +x "$folder"/cuda/tools/*
    cat >"$folder/calls.sh" <<'END'
set -uo pipefail
hidden=("$@") folder=$PWD
cd /
# One may lie within another, and be hidden with it.
for path in "${hidden[@]}"; do [[ ! -d $path ]] || mount -t tmpfs none "$path" || exit; done
ip link set lo up 2>/dev/null # for ranks that meet there
status=0
for call in tests gpt2 resnets; do # ten minutes each
    (cd "$folder" && timeout 600 env PATH="$folder/cuda/tools:$PATH" LD_LIBRARY_PATH="$folder/cuda/lib" \
        travels/run.sh "$call" out) || { echo "$call: status $?" >&2 && status=1; }
done
exit "$status"
END
    local hidden=("$PWD" "$CARGO_TARGET_DIR") apart=(unshare --mount --net) beside_torch=false path status=0
    ((EUID == 0)) || apart+=(--map-root-user)
    mkdir "$folder/empty"
    # Not cargo's registry: emulated, candle's kernels are compiled from there when they are loaded.
    for path in "${CARGO_HOME:-$HOME/.cargo}/bin" "${RUSTUP_HOME:-$HOME/.rustup}"; do
        [[ ! -d $path ]] || hidden+=("$path")
    done
    if ! "${apart[@]}" mount -t tmpfs none "$folder/empty" 2>/dev/null; then
        echo "GPU check: checkout, toolchain and network NOT HIDDEN from it, for that is not allowed here" |
            tee -a "${NOT_RUN:-/dev/null}" >&2
        hidden=() apart=()
    fi
    ! env -i "HOME=$HOME" "PATH=$PATH" "${PYTHON:-python3}" -c 'import torch' 2>/dev/null || beside_torch=true
    local kept=("HOME=$HOME" "PATH=$PATH" "PYTHON=$folder/cuda/tools/python" "REAL_PYTHON=${PYTHON:-python3}" "SMOKE=1" "SECONDS_A_GROUP=240"
        "FEATURES=${GPU_CHECK_FEATURES% nccl}" "TESTS=${TESTS:-golden modules:: corpus candle_methods public_api operator_table readme errors instructions:: kernels::cuda::}")
    (cd "$folder" && "${apart[@]}" env -i "${kept[@]}" bash calls.sh "${hidden[@]}") || status=1
    [[ -z ${OUT:-} ]] || cp -r "$folder/out" "$OUT"
    ((status == 0)) || exit 1
    "${PYTHON:-python3}" - "$folder/out" "$beside_torch" <<'END'
import json, sys, tarfile
wanted = {  # by call: what a row's name begins with, and whether PyTorch has to stand beside it
    "gpt2": {"gpt2 bf16": True, "gpt2 f16, by a graph": False, "gpt2 f16, by a graph / torch.compile": False, "copy 1 GiB": True,
             "host's part, adamw, gpt2": True,
             "product 8192 f16": True, "conv dgrad by cudnn graph, engine ": False, "conv forward by cudnn graph, engine ": False,
             "share of convolutions that fell back": False, "adamw, gpt2": True},
    "resnets": {"resnet50 channels-last batch 128 bf16": True, "conv wgrad by cudnn graph, engine ": False,
                "resnet18 bf16, by a graph / torch.compile": False},
}
wrong, has_torch = [], sys.argv[2] == "true"
for call, names in wanted.items():
    rows = []
    with tarfile.open(f"{sys.argv[1]}/{call}.tar.gz") as archive:
        for member in archive.getmembers():
            if member.name.startswith("./bench-") and member.name.endswith(".json"):
                rows += json.load(archive.extractfile(member))
    for name, beside_torch in names.items():
        found = [row for row in rows if row["name"].startswith(name)]
        if not found or beside_torch and has_torch and not any(row["peer"] for row in found):
            wrong.append(f"{call}: no row {name!r}{' beside PyTorch' if found else ''}, of {len(rows)}")
sys.exit("\n".join(wrong) or None)
END
    files_fit "$folder/out" || { echo "more than 8 files, or one of more than 16 MiB" >&2 && exit 1; }
    local status=0
    grep -h 'no time left\|no test has that name\|is not installed' "$folder"/out/*.txt || status=$?
    ((status == 1)) || exit 1 # 1: there is no such line
}

if [[ ${1:-} == --real ]]; then
    real # and not `real && exit`, within which an error would not end it
    exit
fi
(($# == 0)) || { sed -n '2,/^[^#]/s/^# \?//p' "$0" >&2 && exit 2; }
mkdir -p "$folder"/bin/{cudnn,cuda,nccl}
cp scripts/gpu-run.sh "$folder/run.sh"

# Dies in its third test of five. By themselves all pass but that one.
cat >"$folder/bin/cudnn/lib" <<'END'
#!/usr/bin/env bash
case $1 in
    --list) printf '%s: test\n' a::one a::two b::three b::four b::five ;;
    --exact) [[ $2 != b::three ]] || { echo "test $2 ... FAILED"; exit 101; }; echo "test $2 ... ok" ;;
    *) printf 'test %s ... ok\n' a::one a::two; kill -SEGV $$ ;;
esac
END
# Passes, and checks what it is told of the machine.
cat >"$folder/bin/cudnn/it" <<'END'
#!/usr/bin/env bash
[[ -d $CARGO_MANIFEST_DIR/bin && $REQUIRE_CUDA == 1 && $* == "--skip tidy::" ]] && echo "test c::six ... ok"
END
# Takes no two ranks on one GPU.
cat >"$folder/bin/nccl/lib" <<'END'
#!/usr/bin/env bash
[[ $NCCL_MULTI_RANK_GPU_ENABLE == 1 && $* == "--nocapture dist::nccl" ]] && echo "skipped: one rank a GPU"
END
# Measures three groups of rows. Of those of GPT-2, the second ends the process, and the third is measured by another one.
cat >"$folder/bin/cudnn/gpu" <<'END'
#!/usr/bin/env bash
while (($#)); do
    case $1 in
        --python) peer=$2 ;;
        --part) part=$2 ;;
        --json) json=$2 ;;
        --progress) progress=$2 ;;
    esac
    shift
done
[[ -z ${peer:-} ]] || "$peer" -c 'import torch' || exit
for ((group = $(cat "$progress" 2>/dev/null || echo 0); group < 3; group++)); do
    echo $((group + 1)) >"$progress"
    [[ $part != gpt2 || $group != 1 ]] || kill -SEGV $$
    echo "$part group $group" | tee -a "$json"
done
printf end >"$progress"
END
# Trains, but not in F16.
cat >"$folder/bin/cudnn/cifar10" <<'END'
#!/usr/bin/env bash
while (($#)); do
    case $1 in
        --precision) precision=$2 ;;
        --report) report=$2 ;;
    esac
    shift
done
[[ $precision != f16 ]] || { echo "out of memory" && exit 1; }
cat >"$report" <<'JSON'
{"model": "resnet20", "data": "synthetic", "train_images": 64, "epochs": 2, "batch_size": 16, "device": "cuda",
 "test_accuracy": 0.5, "images_per_second": 32, "weight_bytes": 1, "peak_rss_bytes": 1, "final_loss": 1, "skipped_steps": 0}
JSON
END
mkdir -p "$folder/benches/gpu"
cp scripts/cifar10-table.py "$folder"
echo 'print("PyTorch")' >"$folder/benches/gpu/cifar10_twin.py"
# Never ends.
printf '#!/usr/bin/env bash\n[[ $1 == --list ]] || exec sleep 1000\n' >"$folder/bin/cuda/lib"
cp "$folder/bin/cudnn/it" "$folder/bin/cuda/it"
chmod +x "$folder"/bin/*/*

# A Python without PyTorch, and one with it.
mkdir -p "$folder"/python/{without,with}
echo 'raise ModuleNotFoundError(name="torch")' >"$folder/python/without/torch.py"
echo '__version__, version = "0", __import__("types").SimpleNamespace(cuda=None)' >"$folder/python/with/torch.py"

export PYTHONPATH=$folder/python/without
start=$SECONDS status=0
SECONDS_A_CALL=24 "$folder/run.sh" tests "$folder/out" >"$folder/output" 2>&1 || status=$?
wrong() { echo "gpu-run.sh: $*" >&2 && cat "$folder/output" >&2 && exit 1; }
((status == 1)) || wrong "its status is $status, and some tests failed"
((SECONDS - start <= 40)) || wrong "it took $((SECONDS - start)) seconds, of 24"
for line in '139  lib-cudnn' '0  lib-cudnn-alone-b__four' '0  lib-cudnn-alone-b__five' '101  lib-cudnn-alone-b__three' \
    'lib-cudnn: of 3 tests that did not pass, 2 pass alone, and 0 had no time' '0  it-cudnn' '0  nccl' 'nccl: skipped: one rank a GPU' '124  lib-cuda' '0  it-cuda'; do
    grep -q -- " $line\$" "$folder/out/tests.txt" || wrong "the summary lacks \"$line\""
done
[[ $(ls "$folder/out") == $'tests.tar.gz\ntests.txt' ]] || wrong "it leaves other files: $(ls "$folder/out")"
# Not by a pipe into `grep -q`, which ends at the first match, before what writes to it has ended.
[[ $(tar -tzf "$folder/out/tests.tar.gz") == *lib-cudnn-alone-b__three.log* ]] || wrong "the archive lacks a log"
[[ $(tail -n 3 "$folder/output") == "$(tail -n 3 "$folder/out/tests.txt")" ]] ||
    wrong "its output does not end in the summary"
# A step that hangs has left time to those after it. Where there is none, that is said.
status=0
SECONDS_A_CALL=4 "$folder/run.sh" tests "$folder/short" >"$folder/output" 2>&1 || status=$?
((status == 1)) || wrong "its status is $status, and there was no time"
grep -q -- ' it-cuda: no time left$' "$folder/short/tests.txt" || wrong "it says nothing of steps without time"

# Tests that hang leave time to compute-sanitizer.
mkdir "$folder/tools" "$folder/bin/slow"
cp "$folder/bin/cuda/lib" "$folder/bin/slow/lib"
cp "$folder/bin/cuda/lib" "$folder/bin/slow/it"
printf '#!/usr/bin/env bash\n[[ "$*" == *"/bin/slow/lib kernels::"* ]] && echo "running 3 tests"\n' >"$folder/tools/compute-sanitizer"
chmod +x "$folder/tools/compute-sanitizer"
status=0
SECONDS_A_CALL=24 FEATURES=slow PATH=$folder/tools:$PATH "$folder/run.sh" tests "$folder/slow" >"$folder/output" 2>&1 || status=$?
((status == 1)) || wrong "its status is $status, and tests hung"
for line in '124  lib-slow' '0  memcheck-kernels__attention' '0  memcheck-kernels__multi_tensor' \
    '0  memcheck-kernels__batch_norm' '0  memcheck-kernels__conv__tests__gpus' '0  racecheck-kernels__attention' \
    '0  synccheck-kernels__batch_norm' '124  it-slow'; do
    grep -q -- " $line\$" "$folder/slow/tests.txt" || wrong "with tests that hang, the summary lacks \"$line\""
done

# Without PyTorch, and with one that cannot be loaded, the crate is measured alone.
SECONDS_A_CALL=30 FEATURES=cudnn "$folder/run.sh" resnets "$folder/alone" >"$folder/output" 2>&1 || true
grep -q -- ' PyTorch is not there: the crate is measured alone$' "$folder/alone/resnets.txt" || wrong "it does not say that PyTorch is not there"
if grep -q cifar10-torch "$folder/alone/resnets.txt"; then wrong "it runs PyTorch's side, which is not there"; fi
grep -q -- '0  bench-resnets$' "$folder/alone/resnets.txt" || wrong "without PyTorch, it does not measure the crate"
echo 'import nothing_of_that_name' >"$folder/python/without/torch.py"
SECONDS_A_CALL=30 FEATURES=cudnn "$folder/run.sh" gpt2 "$folder/alone" >"$folder/output" 2>&1 || true
grep -q -- ' 1  PyTorch cannot be loaded: the crate is measured alone$' "$folder/alone/gpt2.txt" || wrong "it does not say that PyTorch is broken"
grep -q nothing_of_that_name "$folder/output" || wrong "it does not say why PyTorch is broken"

# The other calls: what ended a process does not take along what comes after.
PYTHONPATH=$folder/python/with
for call in gpt2 resnets; do
    status=0
    SECONDS_A_CALL=30 FEATURES=cudnn "$folder/run.sh" "$call" "$folder/out" >"$folder/output" 2>&1 || status=$?
    ((status == 1)) || wrong "$call: its status is $status, and some steps failed"
done
rows=$(tar -xzOf "$folder/out/gpt2.tar.gz" ./bench-gpt2.json | tr '\n' ,)
[[ $rows == "gpt2 group 0,gpt2 group 2," ]] || wrong "rows after those that end the process: $rows"
for line in '139  bench-gpt2' '0  bench-gpt2-after-2' '0  bench-passes' '0  bench-operators' '0  bench-gpt2-compiled'; do
    grep -q -- " $line\$" "$folder/out/gpt2.txt" || wrong "the summary of gpt2 lacks \"$line\""
done
for line in '0  bench-resnets' '1  cifar10' '0  cifar10-torch' '0  bench-resnets-compiled'; do
    grep -q -- " $line\$" "$folder/out/resnets.txt" || wrong "the summary of resnets lacks \"$line\""
done
tar -xzOf "$folder/out/resnets.tar.gz" ./cifar10.log >"$folder/output"
grep -q '^| bf16 | 2.00 s ' "$folder/output" || wrong "no table of the precisions that could be trained"
grep -q '^out of memory' "$folder/output" || wrong "nothing says why a precision could not be trained"
files_fit "$folder/out" || wrong "more than 8 files, or one of more than 16 MiB"
if "$folder/run.sh" nothing >/dev/null 2>&1; then wrong "it takes a call that it does not know"; fi
