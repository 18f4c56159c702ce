#!/usr/bin/env bash
# ARM's processors of 64 bits, from another machine.
#
#   scripts/aarch64.sh check               lints the library and its unit tests
#   scripts/aarch64.sh test [FILTER...]    builds the unit tests and runs them under qemu, 10 to 50 times slower
#
# Both add the target by rustup if it is missing; where that fails, `check` says so and passes. `test` needs the packages
# gcc-aarch64-linux-gnu and qemu-user-static of Debian or Ubuntu. Timings under qemu say nothing about a processor.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=aarch64-unknown-linux-gnu

has_target() {
    [[ -d $(rustc --print sysroot)/lib/rustlib/$target ]] || timeout 300 rustup target add $target
}

check() {
    # Build scripts compile some C and assembly, which a check links to nothing: without a compiler, to empty archives.
    if ! command -v aarch64-linux-gnu-gcc >/dev/null; then
        export CC_aarch64_unknown_linux_gnu=true AR_aarch64_unknown_linux_gnu=true
    fi
    cargo clippy --locked --lib --target $target -- -D warnings
    cargo clippy --locked --lib --profile test --target $target -- -D warnings
}

run_tests() {
    local missing=()
    command -v aarch64-linux-gnu-gcc >/dev/null || missing+=(gcc-aarch64-linux-gnu)
    command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
    if ((${#missing[@]})); then
        echo "aarch64.sh: install ${missing[*]}" >&2
        exit 1
    fi
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu"
    # gemm-common's assembly for F16, which no test for ARM runs by, else fits its functions only where they are inlined.
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-Ctarget-feature=+fp16"
    cargo test --locked --lib --target $target -- "$@"
}

case ${1-} in
check)
    if ! has_target; then
        echo "ARM: NOT RUN, for rustup cannot add $target from here" | tee -a "${NOT_RUN:-/dev/null}" >&2
        exit 0
    fi
    check
    ;;
test) shift && has_target && run_tests "$@" ;;
*) echo "usage: scripts/aarch64.sh check | test [FILTER...]" >&2 && exit 2 ;;
esac
