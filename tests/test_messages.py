"""Messages that no other test raises."""

import torch
import torch.distributed as dist

import export
from isogpt.monitor.watchdog import is_out_of_memory, line_of
from model import GPT, GPTConfig

# ------------------------------------------------------------------------------------------------------------
# helpers

SHAPE = dict(n_layer=1, n_head=2, n_embd=8, block_size=16, bias=False, vocab_size=65)
CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------------------------
# checkpoints


# ------------------------------------------------------------------------------------------------------------
# memory


NCCL = "NCCL error in: x.cpp:1, unhandled cuda error\nncclUnhandledCudaError: Call failed.\nLast error:"
FORMS = [
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"),
    (torch.AcceleratorError, "CUDA error: out of memory\nCUDA kernel errors might be reported at some other"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (dist.DistBackendError, f"{NCCL}\nCuda failure 2 'out of memory'"),
    (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried"),
    (RuntimeError, "MPS backend out of memory (MPS allocated: 5.00 GB, other allocations: 2.00 GB)"),
]


def test_forms_of_running_out_of_memory():
    """test_memory.py tests what a run then says and does."""
    for kind, text in FORMS:
        line = f"{kind.__name__}: {text}".splitlines()[0]
        line = "Cuda failure 2 'out of memory'" if "NCCL" in text else line
        assert is_out_of_memory(kind(text)) and line_of(kind(text)) == line


def test_an_export_keeps_what_a_user_has_put_into_the_folder(at, capsys):
    """For example the .gguf file that llama.cpp's converter writes next to the model."""
    at.set(export.tokenizer, "save_tokenizer", lambda folder, *_: folder.mkdir())
    at.set(export.huggingface, "save", lambda folder, *_: (folder / "config.json").write_text("new"))
    for kept in ("", "hf_1", "hf_2"):
        assert export.write_hf(str(at.path), GPT(GPTConfig(**SHAPE), 0), None, "") == at.path / "hf"
        assert sorted(path.name for path in (at.path / "hf").iterdir()) == ["README.md", "config.json"]
        said = capsys.readouterr().err
        assert (f"is now {at.path / kept}\n" in said) if kept else not said
        (at.path / "hf/model.gguf").write_text("old")
    assert (at.path / "hf_1/model.gguf").exists() and (at.path / "hf_2/model.gguf").exists()
