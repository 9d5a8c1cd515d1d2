"""The dtype to compute in, TF32, FlashAttention-3, determinism and random seeds."""

import importlib.util
import os
import platform
import random
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch.nn import attention

from isogpt.common.console import count_text
from isogpt.launch import network
from isogpt.launch.together import gather_objects
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import Plan

# if the ranks' dtypes differ, all ranks use the dtype that comes first here
BY_PRECISION = ("float32", "tf32", "float16", "bfloat16")
# names in torch.cpu.get_capabilities, each of which says that the CPU multiplies the dtype in hardware
CPU_FEATURES = {"bfloat16": ("avx512_bf16", "amx_bf16", "amx_tile"), "float16": ("avx512_fp16", "amx_fp16")}
# AMD's architectures with matrix instructions for bfloat16: CDNA, and RDNA 3 and 4
AMD_WITH_BFLOAT16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


def best_dtype(device: torch.device) -> str:
    """The fastest dtype that trains reliably: bfloat16 or float16 if the device multiplies it in hardware."""
    if device.type == "cuda":
        return "bfloat16" if multiplies_bfloat16(device) else "float16"
    if device.type == "cpu" and any(map(cpu_has, CPU_FEATURES["bfloat16"])):
        return "bfloat16"
    return "float32"


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a GPU multiplies bfloat16 in hardware. ROCm's capability numbers differ from NVIDIA's."""
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(AMD_WITH_BFLOAT16)
    return torch.cuda.get_device_capability(device) >= (8, 0)


def cpu_has(feature: str) -> bool:
    """Whether the CPU has a feature. Without hardware support, bfloat16 is slower than float32."""
    return torch.cpu.get_capabilities().get(feature, False)


def is_emulated(dtype: str, device: torch.device) -> bool:
    """Whether this x86 CPU computes in `dtype` without instructions for this dtype."""
    is_x86 = device.type == "cpu" and cpu_has("sse2")
    return is_x86 and dtype in CPU_FEATURES and not any(map(cpu_has, CPU_FEATURES[dtype]))


def resolve_dtype(wanted: str, device: torch.device, previous: str | None = None) -> str:
    """
    Choose the dtype to compute in.

    Args:
        wanted: a key of plan.DTYPES, or 'auto': `previous` if the device supports it, else the device's best.
        previous: the dtype of the run that is resumed.

    Raises:
        ValueError: the device does not support the dtype.
    """
    if wanted == "auto":
        with suppress(ValueError):  # the run was started on a different kind of device
            return resolve_dtype(previous or best_dtype(device), device)
        return best_dtype(device)
    is_nvidia = device.type == "cuda" and not torch.version.hip
    if wanted == "tf32" and not (is_nvidia and multiplies_bfloat16(device)):
        raise ValueError(f"dtype 'tf32' needs an NVIDIA GPU (Ampere or later), not {device}")
    if wanted == "float16" and device.type == "mps":
        raise ValueError("dtype 'float16' cannot be trained on mps: set --dtype=bfloat16")
    return wanted


def common_dtype(dtypes: list[str]) -> str:
    """Return one dtype for all ranks, from the dtypes that the ranks resolved."""
    return min(dtypes, key=BY_PRECISION.index)


def make_scaler(dtype: str, device: torch.device) -> torch.amp.GradScaler:
    """
    Make the scaler of the loss for float16, which does nothing with other dtypes.

    GradScaler keeps its scale on the device of the first tensor that it scales. `unscale_` copies the inverse
    of the scale to the gradients' device without waiting for the copy (torch 2.13). With cpu_offload, the
    gradients would be multiplied by a number that has not arrived. Therefore, the scale is kept where the
    gradients are.

    Args:
        device: the device of the parameters and gradients.
    """
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "float16")
    scaler.scale(torch.zeros((), device=device))  # creates the scale
    return scaler


def set_numerics(device: torch.device, dtype: str, deterministic: bool) -> None:
    """Set process-wide switches: TF32 unless dtype is float32, and deterministic algorithms if requested."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")
    if deterministic:
        # required for cuBLAS's deterministic mode
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # choose no kernel by timing; torch reads the variable at compilation
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
        torch.use_deterministic_algorithms(True)
        # filling takes time on a GPU, and nothing reads uninitialized memory
        torch.utils.deterministic.fill_uninitialized_memory = False


def set_up(device: torch.device, plan: Plan, deterministic: bool, previous: str | None) -> list[str]:
    """
    Set the process-wide switches of a training run: `set_numerics`, the threads and FlashAttention-3 (all
    ranks).

    Args:
        previous: the dtype of the run that is resumed.

    Returns:
        Sentences for the user about numerics.
    """
    set_numerics(device, plan.dtype, deterministic or plan.exact)
    notes = []
    if previous not in (None, plan.dtype):
        notes.append(f"this run continues with dtype {plan.dtype} (was {previous}): the loss curve changes")
    if plan.model_args.get("residual_dtype") == "bfloat16" != plan.dtype:
        notes.append(f"residual_dtype bfloat16 has no effect, because dtype is {plan.dtype}")
    if is_emulated(plan.dtype, device):
        faster = best_dtype(device)
        notes.append(f"this CPU only emulates {plan.dtype}, which is slow: set --dtype={faster}")
    if plan.exact:
        fix_threads(device)
        return notes + differences_of_devices(gather_objects(kind_of_device(device)))
    return notes if deterministic else notes + use_flash_attention_3(device, plan)


def use_flash_attention_3(device: torch.device, plan: Plan) -> list[str]:
    """
    Let attention use FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608) if its package is installed on a
    machine with a Hopper GPU, and say so. It has no dropout, and its backward pass is not known to repeat its
    bits.
    """
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    can_use = is_hopper and plan.torch_dtype.itemsize == 2 and not plan.model_args["dropout"]
    if not can_use or not importlib.util.find_spec("flash_attn_interface"):
        return []
    try:
        attention.activate_flash_attention_impl("FA3")
    except Exception as e:  # a package that was built for another version of PyTorch can raise anything
        reason = f"{type(e).__name__}: {e}".partition("\n")[0]
        return [f"FlashAttention-3 is installed, but cannot be used: {reason}"]
    # otherwise, PyTorch tries cuDNN's attention first on Hopper (torch 2.11 and 2.13)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return ["attention uses FlashAttention-3"]


def fix_threads(device: torch.device) -> None:
    """
    Let each process on a CPU use OMP_NUM_THREADS threads, by default 1, for `exact`. The bits of some
    kernels, such as the backward pass of LayerNorm, depend on the number of threads, which otherwise depends
    on the number of processes.
    """
    if device.type == "cpu":
        torch.set_num_threads(network.chosen_threads() or 1)


def kind_of_device(device: torch.device) -> str:
    """What the bits of a run with `exact` depend on besides its settings, the data and the programs."""
    if device.type == "cuda":
        return device_name(device)
    return f"{device_name(device)}, {count_text(torch.get_num_threads(), 'thread')}"


def device_name(device: torch.device) -> str:
    """The model of a GPU, or of this machine's CPU with the instructions that PyTorch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with suppress(OSError):  # only Linux has this file
        properties = Path("/proc/cpuinfo").read_text()
        models = {*re.findall(r"^model name\s*: (.*)", properties, re.MULTILINE)}
        name = " and ".join(sorted(models)) or name
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def differences_of_devices(kinds: list[str]) -> list[str]:
    """A sentence about the first rank of which `kind_of_device` is not rank 0's; none if all are alike."""
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            return [f"exact: rank 0 computes on {kinds[0]}, rank {rank} on {kind}: bits may differ"]
    return []


def seed_step(seed: int, step: int, rank: int) -> None:
    """
    Seed all generators for one step. Dropout masks become a function of (seed, step, rank), so that a resumed
    run draws the same masks without any saved random state.
    """
    seed_generators(seed, step, rank)


def seed_micro_batch(seed: int, step: int, number: int, mesh: Mesh) -> None:
    """
    Seed all generators for a micro-batch: the masks of dropout are the same on any number of processes that
    keep micro-batches whole.

    Args:
        number: of the micro-batch's first sequence in the step.
    """
    part = mesh.same_sequences
    seed_generators(seed, step, number, part.index, part.size)


def seed_generators(*key: int) -> None:
    """Seed the generators of this process and its device with whole numbers, such as (seed, step, rank)."""
    number = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    # as torch.manual_seed, which spends 0.1 ms on devices of other kinds while a GPU waits for the host
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(number)
    elif torch.mps.is_available():
        torch.mps.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)
