#!/usr/bin/env bash
# Rehearses scripts/gpu-run.sh, whose real run needs a GPU, with programs that stand in for the tests: one that dies,
# one that hangs. Says what is wrong, and fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
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
# Never ends.
printf '#!/usr/bin/env bash\n[[ $1 == --list ]] || exec sleep 1000\n' >"$folder/bin/cuda/lib"
cp "$folder/bin/cudnn/it" "$folder/bin/cuda/it"
chmod +x "$folder"/bin/*/*

start=$SECONDS status=0
SECONDS_A_CALL=15 "$folder/run.sh" tests "$folder/out" >"$folder/output" 2>&1 || status=$?
wrong() { echo "gpu-run.sh: $*" >&2 && cat "$folder/output" >&2 && exit 1; }
((status == 1)) || wrong "its status is $status, and some tests failed"
((SECONDS - start <= 30)) || wrong "it took $((SECONDS - start)) seconds, of 15"
for line in '139  lib-cudnn' '0  lib-cudnn-alone-b__four' '0  lib-cudnn-alone-b__five' '101  lib-cudnn-alone-b__three' \
    'lib-cudnn: of 3 tests that did not pass, 2 pass alone, and 0 had no time' '0  it-cudnn' '0  nccl' 'nccl: skipped: one rank a GPU' '124  lib-cuda' '0  it-cuda'; do
    grep -q -- " $line\$" "$folder/out/tests.txt" || wrong "the summary lacks \"$line\""
done
[[ $(ls "$folder/out") == $'tests.tar.gz\ntests.txt' ]] || wrong "it leaves other files: $(ls "$folder/out")"
tar -tzf "$folder/out/tests.tar.gz" | grep -q lib-cudnn-alone-b__three.log || wrong "the archive lacks a log"
tail -n 3 "$folder/output" | grep -qF "$(tail -n 3 "$folder/out/tests.txt" | head -n 1)" ||
    wrong "its output does not end in the summary"
# A step that hangs has left time to those after it. Where there is none, that is said.
SECONDS_A_CALL=4 "$folder/run.sh" tests "$folder/short" >"$folder/output" 2>&1 || true
grep -q -- ' it-cuda: no time left$' "$folder/short/tests.txt" || wrong "it says nothing of steps without time"
if "$folder/run.sh" nothing >/dev/null 2>&1; then wrong "it takes a call that it does not know"; fi
