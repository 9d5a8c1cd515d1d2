"""
Weights and configurations from and for transformers: GPT2LMHeadModel, NanoChatForCausalLM, LlamaForCausalLM
and, for a llama with experts, MixtralForCausalLM. Our names are nanoGPT's; the tables below translate them.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from isogpt.common.files import reason_of
from isogpt.common.packages import needed_by
from isogpt.nn.architecture import GPT2, GPTConfig
from isogpt.nn.logits import CHECKED_TOKENS, compare_logits, random_sequences

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# class in transformers, by model_type
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "nanochat": "NanoChatForCausalLM",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
# transformers' name of a GELU -> ours; the last of a kind is exported
GELUS = {"gelu": "none", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}
# values of transformers' settings with an equivalent here
SUPPORTED = {
    "gpt2": {
        "activation_function": GELUS,
        "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False],
        "tie_word_embeddings": [True],
        "add_cross_attention": [False],
    },
    "nanochat": {"hidden_act": ["relu2"], "attention_bias": [False], "final_logit_softcapping": [15.0]},
    "llama": {"hidden_act": ["silu"], "attention_bias": [False], "mlp_bias": [False]},
    "mixtral": {"hidden_act": ["silu"], "sliding_window": [None], "router_jitter_noise": [0.0]},
}
# a config's fields: theirs -> ours
LLAMA_FIELDS = {
    "max_position_embeddings": "block_size",
    "vocab_size": "vocab_size",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "hidden_size": "n_embd",
    "intermediate_size": "n_hidden",
    "tie_word_embeddings": "tied",
    "rms_norm_eps": "norm_eps",
}
FIELDS = {
    "gpt2": {
        "n_positions": "block_size",
        "vocab_size": "vocab_size",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "n_inner": "n_hidden",
        "layer_norm_epsilon": "norm_eps",
    },
    "nanochat": LLAMA_FIELDS,
    "llama": LLAMA_FIELDS,
    "mixtral": LLAMA_FIELDS
    | {
        "num_local_experts": "n_expert",
        "num_experts_per_tok": "n_expert_active",
        "router_aux_loss_coef": "balance_loss",
    },
}
# weights: our names -> theirs. Where there are several, each side's matrices, stacked, are the other's
WEIGHTS = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}
BLOCK = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_attn": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attn.c_proj": "self_attn.o_proj",
}
MLPS = {
    "nanochat": {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"},
    "llama": {"mlp.c_gate": "mlp.gate_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"},
    "mixtral": {
        "mlp.router": "mlp.gate",
        "mlp.experts.c_gate mlp.experts.c_fc": "mlp.experts.gate_up_proj",
        "mlp.experts.c_proj": "mlp.experts.down_proj",
    },
}
# transformers implements GPT-2's attention and MLP with Conv1D, whose weights are (in, out)
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
GPT2_DROPOUT = ("embd_pdrop", "attn_pdrop", "resid_pdrop", "summary_first_dropout")  # their default is 0.1
# the rows of these weights are tokens
ROWS_OF_TOKENS = ("transformer.wte.weight", "lm_head.weight")
OTHER_FORMS = "set --to=ckpt.pt"  # advice if a model cannot be exported
FILE_SIZE = "5GB"  # largest file of weights: transformers transposes all weights of a file before it writes


def load(name: str) -> tuple[dict, dict[str, Tensor]]:
    """
    Load a model with transformers, from a folder or by its name on the Hub. No code in the folder runs.
    Returns the fields of GPTConfig and the weights under our names.

    Raises:
        ValueError: the model cannot be loaded, lacks weights, or is of a different architecture.
    """
    with needed_by(f"loading {name!r}", "transformers"):
        import transformers

    try:
        check_adapter(Path(name))
        values, _ = transformers.PretrainedConfig.get_config_dict(name)
        kind = values.get("model_type")
        if kind not in CLASSES:
            raise ValueError(f"its model_type is {kind!r}: use a model of type {' or '.join(CLASSES)}")
        if quantization := values.get("quantization_config"):
            method = quantization.get("quant_method")
            raise ValueError(f"its weights are quantized by {method}: use the model that was quantized")
        cls = getattr(transformers, CLASSES[kind])
        config = cls.config_class.from_dict(values)
        args = model_args(config)
        GPTConfig(**args)  # building a model of impossible size could take hours
        # eager: config.json may name an attention kernel on the Hub, which would run code
        hf, report = cls.from_pretrained(
            name,
            dtype="auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            attn_implementation="eager",
            trust_remote_code=False,  # otherwise transformers asks at the terminal
        )
    except Exception as e:  # transformers, safetensors and the network raise many types
        reason = shorten(str(e), 250)
        if name in GPT2 and isinstance(e, OSError) and "connect" in reason:
            reason = (
                "it is not in the cache, and HF_HUB_OFFLINE is set or the hub cannot be reached. On a "
                f"machine with Internet access, type: hf download {name} config.json model.safetensors "
                f"tokenizer.json --local-dir=hf-{name}. Copy that folder here, and set --init_from=hf-{name}"
            )
        raise ValueError(f"cannot load {name!r} with transformers: {reason}") from e
    # which transformers would initialize randomly
    wrong = [f"{key} is missing" for key in report["missing_keys"]]
    for key, saved, expected in report["mismatched_keys"]:
        wrong.append(f"{key} is {tuple(saved)}, but config.json says {tuple(expected)}")
    if wrong:
        raise ValueError(f"the weights of {name!r} are not those of a {CLASSES[kind]}: {min(wrong)}")
    # not always what config.json says: transformers does not tie two weights that differ
    args["tied"] = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
    return args, our_weights(hf)


def check_adapter(folder: Path) -> None:
    """Raise ValueError if a folder contains a PEFT adapter, such as LoRA, which is not a model by itself."""
    if (folder / "adapter_config.json").exists():
        merge = f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload()"
        command = f'python -c "from peft import *; {merge}.save_pretrained({f"{folder}-merged"!r})"'
        raise ValueError(f"it is an adapter (LoRA): type: {command}, then use {folder}-merged")


def model_args(config: "PretrainedConfig") -> dict:
    """
    The fields of GPTConfig for a configuration of transformers.

    Raises:
        ValueError: the configuration contains settings without an equivalent here.
    """
    kind = config.model_type
    rope = getattr(config, "rope_parameters", None) or {}
    head_size = config.hidden_size // config.num_attention_heads
    supported = SUPPORTED[kind] | {"head_dim": [None, head_size], "rope_type": ["default"]}
    values = {name: getattr(config, name) for name in supported if hasattr(config, name)}
    values["rope_type"] = rope.get("rope_type", "default")
    unsupported = [f"{name}={value}" for name, value in values.items() if value not in supported[name]]
    if unsupported:
        raise ValueError(f"this {kind} uses settings that are not supported: {', '.join(unsupported)}")
    args = {ours: getattr(config, theirs) for theirs, ours in FIELDS[kind].items()}
    args["vocab_size"] = trained_rows(config)
    if kind == "gpt2":
        args["n_hidden"] = args["n_hidden"] or 0
        return args | {"gelu": GELUS[config.activation_function], "bias": getattr(config, "bias", True)}
    arch = "llama" if kind == "mixtral" else kind
    return args | {"arch": arch, "bias": False, "rope_theta": float(rope.get("rope_theta", 10000.0))}


def trained_rows(config: "PretrainedConfig") -> int:
    """The number of ids of a model, without those that `converted` has added."""
    return min(getattr(config, "trained_vocab_size", config.vocab_size), config.vocab_size)


def names(kind: str, n_layer: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yield (our names, their names) of the weights of nanochat, llama or mixtral, see WEIGHTS."""
    for ours, theirs in WEIGHTS.items():
        yield [f"{ours}.weight"], [f"{theirs}.weight"]
    for i in range(n_layer):
        for ours, theirs in (BLOCK | MLPS[kind]).items():
            suffix = "" if "experts" in theirs else ".weight"
            yield (
                [f"transformer.h.{i}.{name}.weight" for name in ours.split()],
                [f"model.layers.{i}.{name}{suffix}" for name in theirs.split()],
            )


def our_weights(hf: nn.Module) -> dict[str, Tensor]:
    """A transformers model's weights under our names, without the rows that `converted` has added."""
    config, theirs, ours = hf.config, hf.state_dict(), {}
    if config.model_type == "gpt2":
        for name, w in theirs.items():
            if getattr(config, "bias", True) or not name.endswith(".bias"):
                ours[name] = w.t() if name.endswith(CONV1D) else w
    else:
        for ours_here, theirs_here in names(config.model_type, config.num_hidden_layers):
            if theirs_here[0] in theirs:  # nanochat's norms contain no weights
                weights = [theirs[name] for name in theirs_here]
                rows = weights[0].dim() // 3  # experts' weights are (experts, rows, columns)
                parts = torch.cat(weights, rows).chunk(len(ours_here), rows)
                ours |= {name: w.flatten(0, rows) for name, w in zip(ours_here, parts, strict=True)}
    for name in ROWS_OF_TOKENS:
        ours[name] = ours[name][: trained_rows(config)]
    return ours


def their_weights(kind: str, config: GPTConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under the names of a transformers model; a weight that it lacks keeps its name."""
    if kind == "gpt2":
        return {name: w.t() if name.endswith(CONV1D) else w for name, w in weights.items()}
    theirs = dict(weights)
    for ours_here, theirs_here in names(kind, config.n_layer):
        if ours_here[0] in weights:
            parts = [theirs.pop(name) for name in ours_here]
            if ".experts." in theirs_here[0]:  # (experts, rows, columns)
                parts = [w.unflatten(0, (config.n_expert, -1)) for w in parts]
            whole = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
            rows = config.qkv_rows if len(theirs_here) > 1 else len(whole)
            theirs |= zip(theirs_here, whole.split(rows), strict=True)
    return theirs


def save(folder: Path, model: nn.Module, token_ids: dict, file_size: str = FILE_SIZE) -> None:
    """
    Write config.json, generation_config.json and model.safetensors.

    Args:
        model: a GPT with float32 weights on the CPU, which is in evaluation mode afterwards.
        token_ids: see tokenizer.save_tokenizer; of these, suppress_tokens may be missing. If one of them is
            beyond the model's, the exported model gets more ids.
        file_size: of the largest file of weights, such as 5GB.

    Raises:
        ValueError: transformers contains no class for this model, or its class computes other logits.
        OSError: the files cannot be written.
    """
    hf, c = converted(model, token_ids), model.eval().config
    problem = compare_logits(
        lambda tokens: hf(tokens, use_cache=False).logits[..., : c.vocab_size],
        lambda tokens: model(tokens, tokens)[0],
        random_sequences(c, min(c.block_size, CHECKED_TOKENS), torch.device("cpu")),
        embedding=model.transformer.wte,
    )
    if problem:
        name = type(hf).__name__
        raise ValueError(
            f"{name} of transformers does not compute what model.py does: {problem}: {OTHER_FORMS}"
        )
    try:
        hf.save_pretrained(folder, max_shard_size=file_size)
    except Exception as e:  # safetensors replaces the OSError of a full disk
        raise OSError(f"{folder} cannot be written: {reason_of(e)}") from e


def converted(model: nn.Module, token_ids: dict) -> "PreTrainedModel":
    """
    Make the model of transformers with the weights of a GPT; most tensors are shared. Raises ValueError if
    its class contains other weights than the GPT.
    """
    with needed_by("an export to transformers", "transformers"):
        import transformers

    c, weights = model.config, model.state_dict()
    kind = kind_of(c)
    fields = {theirs: getattr(c, ours) for theirs, ours in FIELDS[kind].items()} | token_ids
    suppressed = fields.pop("suppress_tokens", None)
    rows = max([c.vocab_size, *(i + 1 for i in token_ids.values() if isinstance(i, int))])
    if rows > c.vocab_size:
        fields |= {"vocab_size": rows, "trained_vocab_size": c.vocab_size}
        weights = with_more_ids(weights, rows)
    if kind == "gpt2":
        gelus = {ours: theirs for theirs, ours in GELUS.items()}
        # llama.cpp's converter reads n_ctx, the former name of n_positions
        fields |= {"n_ctx": c.block_size, "activation_function": gelus[c.gelu], "bias": c.bias}
        fields |= dict.fromkeys(GPT2_DROPOUT, c.dropout)
    else:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": c.rope_theta}
        fields["attention_dropout"] = c.dropout
    cls = getattr(transformers, CLASSES[kind])
    config = cls.config_class(**fields)
    with torch.device("meta"):
        hf = cls(config)
    if kind != "gpt2":  # its frequencies are not weights, and must not stay on the meta device
        hf.model.rotary_emb = type(hf.model.rotary_emb)(config)
        config.rope_theta = c.rope_theta  # for transformers 4, which does not read rope_parameters
    try:
        theirs = their_weights(kind, c, weights)
        for name, w in hf.state_dict().items():  # GPT-2 without biases gets biases of 0
            if name.endswith(".bias"):
                theirs.setdefault(name, torch.zeros(w.shape))
        hf.load_state_dict(theirs, assign=True)
    except (KeyError, RuntimeError) as e:
        problem = f"the weights of model.py do not fit {CLASSES[kind]} of transformers"
        raise ValueError(f"{problem}: {OTHER_FORMS} ({shorten(str(e), 160)})") from e
    hf.tie_weights()
    hf.generation_config.suppress_tokens = suppressed
    return hf.eval()


def with_more_ids(weights: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """
    The weights of a model that knows vocab_size ids. The rows of the new ones are the mean of the others, so
    that a new token's logit is the mean logit, and its probability at most the mean.
    """
    longer = dict(weights)
    for name in ROWS_OF_TOKENS:
        rows = weights[name]
        added = rows.mean(0, keepdim=True).expand(vocab_size - len(rows), -1)
        longer[name] = torch.cat((rows, added))
    return longer


def add_ids(model: nn.Module, vocab_size: int) -> nn.Module:
    """A copy of a GPT that knows vocab_size ids, see `with_more_ids`; a GPT that knows as many as it is."""
    if vocab_size <= model.config.vocab_size:
        return model
    config = replace(model.config, vocab_size=vocab_size)
    return type(model).from_state(config, with_more_ids(model.state_dict(), vocab_size))


def kind_of(config: GPTConfig) -> str:
    """Return the model_type of a model. Raises ValueError if transformers contains no such model."""
    arch, n_expert = config.arch, config.n_expert
    kind = "mixtral" if n_expert and arch == "llama" else arch
    if kind not in CLASSES or (n_expert and kind != "mixtral"):
        raise ValueError(
            f"transformers contains no class for arch {arch!r} with n_expert {n_expert}, but only for "
            f"{', '.join(CLASSES)} (a llama with experts): {OTHER_FORMS}"
        )
    return kind
