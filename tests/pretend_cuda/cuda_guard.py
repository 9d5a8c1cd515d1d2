"""Compile cuda_guard.cpp and load it, before torch is imported."""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().with_name("cuda_guard.cpp")


def torch_folder() -> Path:
    """Where torch is installed, found without importing it."""
    return Path(importlib.util.find_spec("torch").origin).parent


def torch_version() -> str:
    """The version of torch, such as 2.13.0+cpu, read from its file."""
    return (torch_folder() / "version.py").read_text().split("__version__ = '")[1].split("'")[0]


def missing() -> str:
    """What this machine lacks for a rehearsal, as a sentence; '' if nothing."""
    if not shutil.which("g++"):
        return "the rehearsal compiles cuda_guard.cpp: install g++"
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "the rehearsal needs a CPU build of torch: this one has CUDA"
    if not torch_version().startswith("2.13."):
        return f"the rehearsal was written for torch 2.13: this is {torch_version()}"
    return ""


def library() -> Path:
    """The compiled guard, in the user's cache; compiling it takes half a minute, once for each version."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "isogpt"
    cache.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    target = cache / f"cuda_guard-{torch_version()}-{digest}.so"
    if not target.exists():
        folder = torch_folder()
        made = target.with_suffix(f".{os.getpid()}")
        command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{folder}/include", f"-L{folder}/lib"]
        subprocess.run([*command, str(SOURCE), "-ltorch_cpu", "-lc10", "-o", str(made)], check=True)
        made.rename(target)  # several processes may compile it at once
    return target


def load() -> None:
    """Register a device guard and hooks for CUDA. torch asks whether there are any when it is imported."""
    if "torch" in sys.modules:
        raise ImportError("import harness before torch")
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library()), ctypes.RTLD_GLOBAL)
