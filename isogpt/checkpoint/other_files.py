"""
Files of other programs: what they are and what to type. Nothing is converted here. The commands in the
messages are those of the programs that wrote the files.
"""

from pathlib import Path

import torch

HOW_TO_ADD_A_SHAPE = "add the model's shape, as 'Weights without a shape' in docs/migrating.md shows"
LLM_C = (20240326).to_bytes(4, "little")  # the beginning of llm.c's models


def is_of_transformers(folder: Path) -> bool:
    """Whether a folder contains a model of transformers or an adapter of PEFT."""
    return any((folder / name).exists() for name in ("config.json", "adapter_config.json"))


def about_file(path: Path) -> str:
    """What is in a file that torch.load need not try to read, and what to type; '' for other files."""
    if path.suffix == ".safetensors" or path.name.startswith("pytorch_model"):
        more = "" if is_of_transformers(path.parent) else ", to which its config.json must be copied"
        return f"weights without the model's shape: set --init_from={path.parent}{more}"
    if path.suffix == ".gguf":
        return "a model for llama.cpp: set --init_from= to its folder with config.json and model.safetensors"
    with open(path, "rb") as file:
        if file.read(4) == LLM_C:
            command = f"python dev/eval/export_hf.py --input={path} --output=NEW --spin="
            return f"a model of llm.c: type there: {command}, then set --init_from=NEW"
    return ""


def about_content(content: object) -> str:
    """
    What torch.save wrote, if it does not have nanoGPT's form, and what to type; '' if nothing is recognized.
    """
    if not isinstance(content, dict):
        return f"it contains a {type(content).__name__}, not a dict"
    args = content.get("model_args")
    if isinstance(args, dict) and {"dim", "n_layers"} <= args.keys():
        command = "python export.py NEW --version=-1 --checkpoint=FILE"
        return f"it is a checkpoint of llama2.c: type there: {command}, then set --init_from=NEW"
    # a state_dict, alone or in a checkpoint of Lightning and others
    places = [content] if args else [content, content.get("state_dict"), content.get("model")]
    for weights in places:
        if isinstance(weights, dict) and weights and all(map(torch.is_tensor, weights.values())):
            if any("transformer.h.0.attn.c_attn" in name for name in weights):
                return f"it contains weights without the model's shape: {HOW_TO_ADD_A_SHAPE}"
            other = next((name for name in weights if ".0." in name), next(iter(weights)))
            return (
                f"it contains weights of a different model, such as {other}: convert them to a folder of "
                "transformers (GPT-2, Llama, Mixtral or nanochat), and set --init_from=FOLDER"
            )
    return ""
