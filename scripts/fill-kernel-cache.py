#!/usr/bin/env python3
"""Fills a kernel cache, as the crate would on a GPU of that architecture, with NVRTC and without a GPU.

    scripts/fill-kernel-cache.py FOLDER [--capability 90] [--nvrtc LIBRARY] [--lines]
    scripts/fill-kernel-cache.py --keys 90 13.0 [--lines]

The second prints a checksum of the key of each kernel: of that compute capability and NVRTC's version. A test compares them
with the crate's own. NVRTC comes from the Python package nvidia-cuda-nvrtc unless LIBRARY is named; its version must be the one of that machine.
"""
import argparse
import ctypes
import importlib.util
import multiprocessing
import pathlib
import re
import struct
import zlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
# As in src/kernels/cuda/compile.rs and cache.rs.
UNITS = ["f16", "bf16", "f64", "f32"]
MAGIC = b"candle-amp kernels 1\n"


def beside(name: str):
    """Another script of this folder, whose name has a dash."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compiler = beside("compile-kernels")


def architecture(capability: str) -> str:
    """What NVRTC calls it, as in compile.rs: 9.0 alone has instructions that later ones have not."""
    return f"sm_{capability}{'a' if capability == '90' else ''}"


def sources() -> dict[str, str]:
    """The code of each `Source` of the crate, by its name."""
    found = {}
    for path in sorted((ROOT / "src/kernels").rglob("*.rs")):
        # The optimizers': one file, of which each compiles a part.
        for name, number in re.findall(r'= source!\("(\w+)", (\d+)\);', path.read_text()):
            code = (path.parent / "optimizer.cu").read_text()
            found[f"optimizer_{name}"] = f"#define ONLY {number}\n{code}"
        for name, code in re.findall(r'Source \{\s*name: "(\w+)",\s*code: (.*?)\s*,?\s*\};', path.read_text(), re.S):
            if parts := re.findall(r'include_str!\("([^"]+)"\)', code):
                found[name] = "".join((path.parent / part).read_text() for part in parts)
    return found


def job(name: str, unit: str, code: str, arch: str, version: str, lines: bool) -> tuple[str, list[str], str]:
    """The text that is compiled, the options, and the key of the cache."""
    options = [f"--gpu-architecture={arch}", *compiler.OPTIONS, *(["--generate-line-info"] if lines else [])]
    others = "".join(f"#define OF_{other.upper()}(...)\n" for other in UNITS if other != unit)
    text = others + "".join(header.read_text() for header in compiler.COMMON) + code
    manifest = (ROOT / "Cargo.toml").read_text()
    crate = re.search(r'^version = "(.*)"$', manifest, re.M).group(1)
    return text, options, f"candle-amp {crate}, NVRTC {version}, {' '.join(options)}\n{text}"


def fill(task: tuple[pathlib.Path, str, str, str, str, str | None, bool]) -> str:
    folder, name, unit, code, arch, library, lines = task
    nvrtc = ctypes.CDLL(library) if library else compiler.nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    text, options, key = job(name, unit, code, arch, f"{major.value}.{minor.value}", lines)
    program = ctypes.c_void_p()
    title = f"candle_amp_{name}_{unit}.cu".encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), title, 0, None, None)
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if nvrtc.nvrtcCompileProgram(program, len(options), array):
        raise SystemExit(f"{name}_{unit} does not compile; scripts/compile-kernels.sh says why")
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    packed = MAGIC + struct.pack("<QQ", len(key.encode()), size.value) + key.encode() + binary.raw
    file = folder / f"{name}_{unit}-{arch}-{zlib.crc32(key.encode()):08x}.cubin"
    file.write_bytes(packed + struct.pack("<I", zlib.crc32(packed)))
    return file.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    parser.add_argument("--capability", default="90", help="of the GPU, without its dot")
    parser.add_argument("--nvrtc", help="the library, else that of the Python package")
    parser.add_argument("--only", nargs="+", help="names of sources; all by default")
    parser.add_argument("--lines", action="store_true", help="with line numbers, as CANDLE_AMP_LINEINFO=1 asks for them")
    parser.add_argument("--keys", nargs=2, metavar=("CAPABILITY", "VERSION"))
    args = parser.parse_args()
    chosen = {name: code for name, code in sources().items() if not args.only or name in args.only}
    units = [(name, unit, code) for name, code in chosen.items() for unit in UNITS]
    if args.keys:
        for name, unit, code in units:
            _, _, key = job(name, unit, code, architecture(args.keys[0]), args.keys[1], args.lines)
            print(f"{name}_{unit} {zlib.crc32(key.encode()):08x}")
        return
    if not args.folder:
        parser.error("a folder is needed")
    args.folder.mkdir(parents=True, exist_ok=True)
    tasks = [(args.folder, *unit, architecture(args.capability), args.nvrtc, args.lines) for unit in units]
    with multiprocessing.Pool() as pool:
        files = pool.map(fill, tasks, chunksize=1)
    print(f"{len(files)} kernels, {sum((args.folder / file).stat().st_size for file in files) // 1000000} MB")


if __name__ == "__main__":
    main()
