#!/usr/bin/env python3
"""Compiles every CUDA kernel of the crate with NVRTC, for each architecture; no GPU is needed.

    scripts/compile-kernels.py [--arch sm_75 sm_80 sm_90a] [--keep FOLDER] [--resources FILE] [NAME ...]

NVRTC comes from the Python package nvidia-cuda-nvrtc; scripts/compile-kernels.sh installs it. Its assembler, ptxas, says
what each kernel takes of a multiprocessor. It is an error if a kernel spills other than scripts/kernel-spills.tsv says, or
takes more than there is for the blocks of its launch bounds.
"""
import argparse
import ctypes
import dataclasses
import functools
import glob
import itertools
import multiprocessing
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# As in src/kernels/cuda/compile.rs.
COMMON = [ROOT / "src/kernels/cuda/common.cuh", ROOT / "src/kernels/cuda/many.cuh"]
OPTIONS = ["--std=c++17", "--fmad=false", "--device-as-default-execution-space"]
SPILLS = ROOT / "scripts/kernel-spills.tsv"

REGISTERS = 65536  # of a multiprocessor, and of a block
# Bytes of shared memory, and warps, of a multiprocessor; each block takes 1 KiB of the former from sm_80 on.
MULTIPROCESSORS = {"sm_75": (64 << 10, 32, 0), "sm_80": (164 << 10, 64, 1 << 10), "sm_90a": (228 << 10, 64, 1 << 10)}
THREADS = 256  # of blocks of kernels without launch bounds: `Grid::THREADS`


@dataclasses.dataclass
class Kernel:
    """What ptxas says of a kernel."""

    name: str
    arch: str
    registers: int
    shared: int  # bytes a block, without what a launch asks for
    stored: int  # bytes a thread spills
    loaded: int
    threads: int  # a block at most, 0 without launch bounds
    blocks: int  # a multiprocessor is to have room for

    def takes(self) -> tuple[int, int, int]:
        """Warps, registers and bytes of shared memory of a block."""
        reserved = MULTIPROCESSORS[self.arch][2]
        warps = -(-(self.threads or THREADS) // 32)
        return warps, warps * 32 * -(-self.registers // 8) * 8, self.shared + reserved

    def at_once(self) -> int:
        """The blocks that a multiprocessor has room for, leaving out what a launch asks for."""
        shared, most, _ = MULTIPROCESSORS[self.arch]
        warps, registers, bytes_ = self.takes()
        return min(most // warps, REGISTERS // registers, shared // bytes_ if bytes_ else most)


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


def text(program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    to = ctypes.create_string_buffer(size.value)
    getattr(nvrtc(), f"nvrtcGet{what}")(program, to)
    return to.value.decode().strip("\0\n ")


def resources(arch: str, log: str, ptx: str) -> list[Kernel]:
    bounds = {}
    for name, directives in re.findall(r"\.entry (\w+)\([^)]*\)([^{]*)\{", ptx):
        threads = re.search(r"\.maxntid (\d+)", directives)
        blocks = re.search(r"\.minnctapersm (\d+)", directives)
        bounds[name] = [int(found[1]) if found else 0 for found in (threads, blocks)]
    kernels = []
    for part in log.split("Compiling entry function ")[1:]:
        name = re.match(r"'(\w+)'", part)[1]
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        shared = re.search(r"(\d+) bytes smem", part)
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        kernels.append(
            Kernel(name, arch, registers, int(shared[1]) if shared else 0, int(spills[1]), int(spills[2]), *bounds.pop(name))
        )
    if bounds:
        sys.exit(f"ptxas says nothing of {', '.join(bounds)} for {arch}")
    return kernels


@dataclasses.dataclass
class Compiled:
    path: pathlib.Path
    arch: str
    log: str
    size: int  # bytes of machine code: none where it did not compile
    kernels: list[Kernel]


def compile_for(task: tuple[pathlib.Path, str], keep: pathlib.Path | None) -> Compiled:
    path, arch = task
    beside = "".join(header.read_text() for header in sorted(path.parent.glob("*.cuh")))
    common = "".join(header.read_text() for header in COMMON)
    code = common + beside + path.read_text()
    name = f"candle_amp_{kernel(path)}.cu"
    lib = nvrtc()
    program = ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(program), code.encode(), name.encode(), 0, None, None)
    options = [f"--gpu-architecture={arch}", "--ptxas-options=--verbose", *OPTIONS]
    array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    failed = lib.nvrtcCompileProgram(program, len(options), array)
    log = text(program, "ProgramLog")
    size, kernels = ctypes.c_size_t(), []
    if not failed:
        kernels = resources(arch, log, text(program, "PTX"))
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        if keep:
            code = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetCUBIN(program, code)
            (keep / f"{kernel(path)}.{arch}.cubin").write_bytes(code.raw)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    others = [line for line in log.splitlines() if not re.match(r"ptxas (info|  )", line)]
    return Compiled(path, arch, "\n".join(others), size.value, kernels)


def known_spills() -> dict[tuple[str, str], tuple[int, int]]:
    """By architecture and kernel, the bytes that a thread is known to store and load."""
    rows = [line.split("\t") for line in SPILLS.read_text().splitlines()[1:]]
    for row in rows:
        if len(row) != 5 or not row[4]:
            sys.exit(f"{SPILLS.name}: a row has five columns, the last one a reason: {row}")
    return {(arch, name): (int(stored), int(loaded)) for arch, name, stored, loaded, _ in rows}


def faults(kernel: Kernel, known: tuple[int, int]) -> list[str]:
    found, what = [], f"{kernel.name} for {kernel.arch}"
    spills = (kernel.stored, kernel.loaded)
    if spills != known:
        found.append(f"{what} stores and loads {spills} spilled bytes a thread; {SPILLS.name} says {known}")
    # Kernels that are to have several blocks at once are not for sm_75, where they compile all the same.
    blocks = 1 if kernel.arch == "sm_75" else max(kernel.blocks, 1)
    if kernel.at_once() < blocks:
        _, registers, shared = kernel.takes()
        found.append(
            f"{what}: a multiprocessor has no room for {blocks} blocks of {kernel.threads or THREADS} threads, "
            f"{registers} registers and {shared} bytes of shared memory"
        )
    return found


def as_row(compiled: Compiled, kernel: Kernel) -> list[object]:
    of = kernel
    warps = of.at_once() * of.takes()[0]
    return [of.arch, compiled.path.relative_to(ROOT), of.name, of.registers, of.shared, of.stored, of.loaded, of.threads, warps]


COLUMNS = ["architecture", "source", "kernel", "registers", "shared bytes", "spilled bytes stored", "loaded", "threads", "warps"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="kernel folders; all by default")
    parser.add_argument("--arch", nargs="+", default=["sm_75", "sm_80", "sm_90a"])
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for the machine code, for nvdisasm, say")
    parser.add_argument("--resources", type=pathlib.Path, help="a file for a table of what each kernel takes")
    args = parser.parse_args()
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    nvrtc()  # a clear end where there is none
    paths = [
        path
        for path in sorted(ROOT.glob("src/kernels/**/*.cu"))
        if not args.names or {kernel(path), path.parent.name} & set(args.names)
    ]
    spills, wrong, rows = known_spills(), [], []
    with multiprocessing.Pool() as pool:
        results = pool.imap(functools.partial(compile_for, keep=args.keep), itertools.product(paths, args.arch))
        for path, all_compiled in itertools.groupby(results, key=lambda compiled: compiled.path):
            parts, name = [], path.relative_to(ROOT)
            for compiled in all_compiled:
                arch, kernels = compiled.arch, compiled.kernels
                if compiled.log:
                    print(f"{name} for {arch}:\n{compiled.log}")
                if not compiled.size:
                    wrong.append(f"{name} for {arch} does not compile")
                    parts.append(f"{arch} FAILED")
                    continue
                for one in kernels:
                    wrong += faults(one, spills.pop((arch, one.name), (0, 0)))
                    rows.append(as_row(compiled, one))
                most = max(one.registers for one in kernels)
                spilling = sum(one.stored + one.loaded > 0 for one in kernels)
                spill = f", {spilling} spill" if spilling else ""
                parts.append(f"{arch} {compiled.size // 1024} KiB, {most} registers{spill}")
            print(f"{name}: {'; '.join(parts)}", flush=True)
    if not args.names:
        wrong += [f"{SPILLS.name}: there is no {name} for {arch}" for arch, name in spills if arch in args.arch]
    if args.resources:
        lines = ["\t".join(map(str, row)) for row in [COLUMNS, *rows]]
        args.resources.write_text("\n".join(lines) + "\n")
    for fault in wrong:
        print(fault, file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
