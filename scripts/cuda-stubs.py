#!/usr/bin/env python3
"""Writes libraries to link against where there is no CUDA: cuda-stubs.py CUDARC FOLDER.

CUDARC is the source of the crate cudarc, whose bindings name every function that a program can call.
The libraries have those functions, which do nothing, and the sonames of CUDA 13's, so that on a machine
with CUDA the program finds the real ones.
"""
import pathlib
import re
import subprocess
import sys

LIBRARIES = {  # cudarc's module: the library's name for the linker, and its soname
    "driver": ("cuda", "libcuda.so.1"),
    "runtime": ("cudart", "libcudart.so.13"),
    "cublas": ("cublas", "libcublas.so.13"),
    "cublaslt": ("cublasLt", "libcublasLt.so.13"),
    "curand": ("curand", "libcurand.so.10"),
    "nvrtc": ("nvrtc", "libnvrtc.so.13"),
    "cudnn": ("cudnn", "libcudnn.so.9"),
    "nccl": ("nccl", "libnccl.so.2"),
}
# What host code that nvcc compiled calls; no binding has it.
NVCC_CALLS = """__cudaRegisterFatBinary __cudaRegisterFatBinaryEnd __cudaUnregisterFatBinary
__cudaRegisterFunction __cudaRegisterVar __cudaRegisterHostVar __cudaRegisterManagedVar
__cudaPushCallConfiguration __cudaPopCallConfiguration __cudaInitModule __cudaGetKernel
__cudaLaunchKernel __cudaLaunchKernel_ptsz""".split()


def main(cudarc: pathlib.Path, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for module, (name, soname) in LIBRARIES.items():
        functions = set(NVCC_CALLS if module == "runtime" else [])
        for source in (cudarc / "src" / module / "sys").rglob("*.rs"):
            functions |= set(re.findall(r"\bfn ((?:cu|nv|nccl)\w+)\s*[(<]", source.read_text()))
        if len(functions) < 20:
            sys.exit(f"only {len(functions)} functions of {module} in {cudarc}: has its layout changed?")
        code = "\n".join(f"void {function}(void) {{}}" for function in sorted(functions))
        library = folder / f"lib{name}.so"
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library, f"-Wl,-soname,{soname}"]
        subprocess.run(command, input=code, text=True, check=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
