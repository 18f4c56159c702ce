#!/usr/bin/env python3
"""Compiles every CUDA kernel of the crate with NVRTC, for each architecture; no GPU is needed.

    scripts/compile-kernels.py [--arch sm_75 sm_80 sm_90a] [--keep FOLDER] [NAME ...]

NVRTC comes from the Python package nvidia-cuda-nvrtc; scripts/compile-kernels.sh installs it.
"""
import argparse
import ctypes
import functools
import glob
import itertools
import multiprocessing
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# As in src/kernels/cuda/compile.rs.
COMMON = [ROOT / "src/kernels/cuda/common.cuh", ROOT / "src/kernels/cuda/many.cuh"]
OPTIONS = ["--std=c++17", "--fmad=false", "--device-as-default-execution-space"]


def nvrtc() -> ctypes.CDLL:
    for folder in sys.path:
        found = sorted(glob.glob(f"{folder}/nvidia/**/libnvrtc*.so.*", recursive=True))
        found = [f for f in found if "alt" not in f]
        if found:
            # The builtins first: NVRTC looks for them by name, and finds what is loaded.
            return [ctypes.CDLL(f) for f in found][-1]
    sys.exit("no libnvrtc: pip install nvidia-cuda-nvrtc")


def kernel(path: pathlib.Path) -> str:
    return path.parent.name if path.stem == "kernel" else path.stem


def compile_for(task: tuple[pathlib.Path, str], keep: pathlib.Path | None) -> tuple[pathlib.Path, str, str, int]:
    """The task, the log, and how many bytes of machine code: none where it did not compile."""
    path, arch = task
    beside = "".join(header.read_text() for header in sorted(path.parent.glob("*.cuh")))
    common = "".join(header.read_text() for header in COMMON)
    code = common + beside + path.read_text()
    name = f"candle_amp_{kernel(path)}.cu"
    lib = nvrtc()
    program = ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(program), code.encode(), name.encode(), 0, None, None)
    options = [f"--gpu-architecture={arch}", *OPTIONS]
    array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    failed = lib.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    size.value = 0
    if not failed:
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        if keep:
            code = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetCUBIN(program, code)
            (keep / f"{kernel(path)}.{arch}.cubin").write_bytes(code.raw)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return path, arch, log.value.decode().strip("\0\n "), size.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="kernel folders; all by default")
    parser.add_argument("--arch", nargs="+", default=["sm_75", "sm_80", "sm_90a"])
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for the machine code, for nvdisasm, say")
    args = parser.parse_args()
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    nvrtc()  # a clear end where there is none
    paths = [
        path
        for path in sorted(ROOT.glob("src/kernels/**/*.cu"))
        if not args.names or {kernel(path), path.parent.name} & set(args.names)
    ]
    failures = 0
    with multiprocessing.Pool() as pool:
        results = pool.imap(functools.partial(compile_for, keep=args.keep), itertools.product(paths, args.arch))
        for path, compiled in itertools.groupby(results, key=lambda result: result[0]):
            sizes, name = [], path.relative_to(ROOT)
            for _, arch, log, size in compiled:
                failures += size == 0
                if log:
                    print(f"{name} for {arch}:\n{log}")
                sizes.append(f"{arch} {size // 1024} KiB" if size else f"{arch} FAILED")
            print(f"{name}: {', '.join(sizes)}", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
