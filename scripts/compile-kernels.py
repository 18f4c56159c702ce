#!/usr/bin/env python3
"""Compiles every CUDA kernel of the crate with NVRTC, for each architecture; no GPU is needed.

    scripts/compile-kernels.py [--arch sm_75 sm_80 sm_90] [NAME ...]

NVRTC comes from the Python package nvidia-cuda-nvrtc; scripts/compile-kernels.sh installs it.
"""
import argparse
import ctypes
import glob
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMON = ROOT / "src/kernels/cuda/common.cuh"
# As in src/kernels/cuda/compile.rs.
OPTIONS = ["--std=c++17", "--fmad=false", "--device-as-default-execution-space"]


def nvrtc() -> ctypes.CDLL:
    for folder in sys.path:
        found = sorted(glob.glob(f"{folder}/nvidia/**/libnvrtc*.so.*", recursive=True))
        found = [f for f in found if "alt" not in f]
        if found:
            # The builtins first: NVRTC looks for them by name, and finds what is loaded.
            return [ctypes.CDLL(f) for f in found][-1]
    sys.exit("no libnvrtc: pip install nvidia-cuda-nvrtc")


def compile_for(lib: ctypes.CDLL, name: str, code: str, arch: str) -> tuple[str, bytes]:
    """The log, and the machine code; empty where it did not compile."""
    program = ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(program), code.encode(), name.encode(), 0, None, None)
    options = [f"--gpu-architecture={arch}", *OPTIONS]
    array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    failed = lib.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    binary = b""
    if not failed:
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, buffer)
        binary = buffer.raw
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode(), binary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="kernel folders; all by default")
    parser.add_argument("--arch", nargs="+", default=["sm_75", "sm_80", "sm_90"])
    args = parser.parse_args()
    lib, failures = nvrtc(), 0
    for path in sorted(ROOT.glob("src/kernels/**/*.cu")):
        name = path.parent.name if path.stem == "kernel" else path.stem
        if args.names and name not in args.names and path.parent.name not in args.names:
            continue
        beside = "".join(header.read_text() for header in sorted(path.parent.glob("*.cuh")))
        code = COMMON.read_text() + beside + path.read_text()
        sizes = []
        for arch in args.arch:
            log, binary = compile_for(lib, f"candle_amp_{name}.cu", code, arch)
            if not binary:
                failures += 1
                print(f"FAILED {path.relative_to(ROOT)} for {arch}\n{log}")
            elif log.strip("\0\n "):
                print(f"{path.relative_to(ROOT)} for {arch}:\n{log}")
            sizes.append(f"{arch} {len(binary) // 1024} KiB")
        print(f"{path.relative_to(ROOT)}: {', '.join(sizes)}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
