#!/usr/bin/env bash
# Builds the emulated GPU's libraries and its nvcc into a folder: build.sh FOLDER CUDARC_SOURCES.
# Takes a while only where something has changed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd) cudarc=$2

cd "$here"
version=$(cat build.sh ./*/*.?pp include/*.h include/cuda/std/* | sha256sum | cut -c1-16)
# Of what decides how a kernel is compiled.
kernels=$(cat device/* compiler/* include/*.h* include/cuda/std/* | sha256sum | cut -c1-16)
[[ $(cat "$out/version" 2>/dev/null) == "$version" ]] && exit
exec 9>"$out/lock" && flock 9 # for builds that run side by side
[[ $(cat "$out/version" 2>/dev/null) == "$version" ]] && exit

mkdir -p "$out"/{bin,lib,cache,objects}
# Nothing that is in use is written to: it is replaced.
rm -rf "$out"/{device,include} "$out"/objects/*
cp -r device include "$out"

flags=(-std=c++17 -O2 -g1 -fPIC -Wall -Wextra -Wno-return-type-c-linkage -Wno-unused-parameter
    "-DEMULATED_GPU_VERSION=\"$kernels\"")

compile() { # source...
    local source
    for source in "$@"; do
        g++ "${flags[@]}" -c "$source" -o "$out/objects/$(basename "$source" .cpp).o"
    done
}

# What cudarc can call and nobody has written yet: says its name, and returns an error.
stubs() { # cudarc's module, error
    {
        echo '#include <stdio.h>'
        echo '#define STUB(name) __attribute__((weak)) int name(void) \'
        echo "{ fputs(\"emulated GPU: \" #name \" is not implemented\\n\", stderr); return $2; }"
        grep -rhoE '\bfn (cu|nv|nccl)[A-Za-z0-9_]+ *[(<]' "$cudarc/src/$1/sys" |
            sed -E 's/fn ([A-Za-z0-9_]+).*/STUB(\1)/' | sort -u
    } >"$out/objects/$1-stubs.c"
    gcc -O1 -fPIC -fno-builtin -c "$out/objects/$1-stubs.c" -o "$out/objects/$1-stubs.o"
}

link() { # name, major version of its soname, objects...
    local name=$1 soname=lib$1.so.$2
    shift 2
    g++ -shared "${@/#/$out/objects/}" -o "$out/lib/$soname.new" -Wl,-soname,"$soname" \
        -L"$out/lib" -Wl,-rpath,"\$ORIGIN" ${after[@]+"${after[@]}"} -ldl -lpthread
    mv "$out/lib/$soname.new" "$out/lib/$soname"
    ln -sf "$soname" "$out/lib/lib$name.so"
}

compile driver/*.cpp & driver=$!
compile compiler/*.cpp
flags+=(-O3)
grep -qw fma /proc/cpuinfo && flags+=(-mavx2 -mfma)
compile libraries/*.cpp
wait $driver
stubs driver 801
stubs nvrtc 11
stubs cublas 15
stubs cublaslt 15
stubs curand 999
stubs runtime 801
stubs cudnn 3000
stubs nccl 3

after=()
link cuda 1 {fibers,products,races,faults,memory,memory_calls,context,streams,graphs,modules,compiler,rewrite}.o driver-stubs.o
link nvrtc 13 {nvrtc,compiler,rewrite}.o nvrtc-stubs.o
link cudart 13 runtime-stubs.o
after=(-lcuda)
link cudnn 9 {cudnn,cudnn_graph,product}.o cudnn-stubs.o
link cublas 13 {cublas,product}.o cublas-stubs.o
link cublasLt 13 {cublaslt,product}.o cublaslt-stubs.o
link curand 10 curand.o curand-stubs.o
link nccl 2 nccl.o nccl-stubs.o
g++ "$out"/objects/{nvcc,compiler,rewrite}.o -o "$out/bin/nvcc.new" -ldl
mv "$out/bin/nvcc.new" "$out/bin/nvcc"
echo "$version" >"$out/version"
