"""
Weights and configurations from and for transformers: GPT2LMHeadModel, NanoChatForCausalLM, LlamaForCausalLM
and, for a llama with experts, MixtralForCausalLM. Our names are nanoGPT's; the tables below translate them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from isogpt.common.packages import needed_by
from isogpt.nn.architecture import MOST, GPTConfig
from isogpt.nn.logits import SEQUENCES_WITH_EXPERTS, is_rounding, largest_difference, pseudo_random_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# values of init_from that are not folders, and the shapes of these models (Radford et al. 2019, table 2; the
# numbers of heads are from the models' config.json)
GPT2 = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}
# class in transformers, by model_type
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "nanochat": "NanoChatForCausalLM",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
# transformers' name of a GELU -> ours
GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
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
# their names of a config's fields -> ours
GPT2_FIELDS = {
    "n_positions": "block_size",
    "vocab_size": "vocab_size",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "n_inner": "n_hidden",
    "layer_norm_epsilon": "norm_eps",
}
FIELDS = {
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
EXPERT_FIELDS = {
    "num_local_experts": "n_expert",
    "num_experts_per_tok": "n_expert_active",
    "router_aux_loss_coef": "balance_loss",
}
FIELDS_OF = {"gpt2": GPT2_FIELDS, "nanochat": FIELDS, "llama": FIELDS, "mixtral": FIELDS | EXPERT_FIELDS}
# our names of parameters -> theirs; c_attn is stacked from several
NAMES = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}
BLOCK = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj"}
MLPS = {
    "nanochat": {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"},
    "llama": {"mlp.c_gate": "mlp.gate_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"},
    "mixtral": {
        "mlp.router": "mlp.gate",
        "mlp.experts.c_gate": "mlp.experts.gate_proj",
        "mlp.experts.c_fc": "mlp.experts.up_proj",
        "mlp.experts.c_proj": "mlp.experts.down_proj",
    },
}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# transformers implements GPT-2's attention and MLP with Conv1D, whose weights are (in, out)
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# otherwise transformers asks at the terminal whether to run a folder's Python files
RUN_NO_CODE = {"trust_remote_code": False}
OTHER_FORMS = "set --to=ckpt.pt"  # advice if a model cannot be exported
# the rows of these weights are tokens
ROWS_OF_TOKENS = ("transformer.wte.weight", "lm_head.weight")
FILE_SIZE = "5GB"  # largest file of weights: transformers transposes all weights of a file before it writes
CHECKED_TOKENS = 2048  # length of the sequence on which an exported model is compared with ours, at most


def load(name: str) -> "PreTrainedModel":
    """
    Load a model with transformers, from a folder or by its name on the Hub. No code in the folder runs.

    Raises:
        ValueError: the model cannot be loaded, lacks weights, needs Python code in the folder, or is of a
            different architecture.
    """
    with needed_by(f"loading {name!r}", "transformers"):
        import transformers

    try:
        check_adapter(Path(name))
        config = transformers.AutoConfig.from_pretrained(name, **RUN_NO_CODE)
        kind = config.model_type
        if quantization := getattr(config, "quantization_config", None):
            method = dict(quantization).get("quant_method", "an unknown method")
            raise ValueError(f"its weights are quantized by {method}: use the model that was quantized")
        if kind not in CLASSES:
            raise ValueError(f"its model_type is {kind!r}: {possible_types()}")
        if config.num_hidden_layers > MOST["n_layer"]:  # building them could take hours
            layers = f"{config.num_hidden_layers:,} layers"
            raise ValueError(f"config.json says {layers}: at most {MOST['n_layer']:,} are possible")
        cls = getattr(transformers, CLASSES[kind])
        # eager: config.json may name an attention kernel on the Hub, which would run code
        hf, report = cls.from_pretrained(
            name,
            dtype="auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            attn_implementation="eager",
            **RUN_NO_CODE,
        )
    except Exception as e:  # transformers, safetensors and the network raise many types
        raise ValueError(f"cannot load {name!r} with transformers: {reason_of(name, e)}") from e
    # transformers randomly initializes weights that are missing or of a different shape
    if report["missing_keys"]:
        raise ValueError(
            f"{name!r} is not a complete {CLASSES[kind]}: {min(report['missing_keys'])} is missing"
        )
    if report["mismatched_keys"]:
        key, saved, expected = min(report["mismatched_keys"])
        shapes = f"{key} is {tuple(saved)}, but config.json says {tuple(expected)}"
        raise ValueError(f"the weights and the config.json of {name!r} do not belong together: {shapes}")
    return hf


def possible_types() -> str:
    """Which models of transformers can be loaded."""
    return f"use a model of type {' or '.join(CLASSES)}"


def check_adapter(folder: Path) -> None:
    """Raise ValueError if a folder contains a PEFT adapter, such as LoRA, which is not a model by itself."""
    if (folder / "adapter_config.json").exists():
        merge = f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload()"
        command = f'python -c "from peft import *; {merge}.save_pretrained({f"{folder}-merged"!r})"'
        raise ValueError(f"it is an adapter (LoRA): type: {command}, then use {folder}-merged")


def reason_of(name: str, error: Exception) -> str:
    """Why transformers could not load a model, and what to do about it."""
    if "trust_remote_code" in str(error):
        return f"its model_type needs custom Python code, which is not run: {possible_types()}"
    if name in GPT2 and isinstance(error, OSError) and "connect" in str(error):
        return (
            "it is not in the cache, and the Hugging Face hub cannot be reached. On a machine with Internet "
            f"access, type: hf download {name} config.json model.safetensors tokenizer.json "
            f"--local-dir=hf-{name}. Copy that folder here, and set --init_from=hf-{name}"
        )
    return " ".join(str(error).split())[:250]


def model_args(config: "PretrainedConfig") -> dict:
    """
    The fields of GPTConfig for a configuration of transformers.

    Raises:
        ValueError: the configuration contains settings without an equivalent here.
    """
    kind = config.model_type
    rope = getattr(config, "rope_parameters", None) or {}
    values = {name: getattr(config, name) for name in SUPPORTED[kind] if hasattr(config, name)}
    unsupported = [f"{name}={value}" for name, value in values.items() if value not in SUPPORTED[kind][name]]
    if rope.get("rope_type", "default") != "default":
        unsupported.append(f"rope_type={rope['rope_type']}")
    head_dim = getattr(config, "head_dim", None)  # NanoChatConfig contains head_dim only if config.json does
    if head_dim and head_dim * config.num_attention_heads != config.hidden_size:
        unsupported.append(f"head_dim={head_dim}")
    if unsupported:
        raise ValueError(f"this {kind} uses settings that are not supported: {', '.join(unsupported)}")
    if kind == "gpt2":
        args = {ours: getattr(config, theirs) or 0 for theirs, ours in GPT2_FIELDS.items()}
        args["vocab_size"] = trained_rows(config)
        return args | {"gelu": GELUS[config.activation_function], "bias": getattr(config, "bias", True)}
    args = {ours: getattr(config, theirs) for theirs, ours in FIELDS_OF[kind].items()}
    args["vocab_size"] = trained_rows(config)
    arch = "llama" if kind == "mixtral" else kind
    return args | {"arch": arch, "bias": False, "rope_theta": float(rope.get("rope_theta", 10000.0))}


def trained_rows(config: "PretrainedConfig") -> int:
    """The number of ids of a model, without those that `with_added_rows` has added."""
    rows = getattr(config, "trained_vocab_size", None)
    return rows if isinstance(rows, int) and 0 < rows < config.vocab_size else config.vocab_size


def our_weights(hf: nn.Module) -> dict[str, Tensor]:
    """A transformers model's weights under our names."""
    rows, ours = trained_rows(hf.config), all_our_weights(hf)
    return {name: w[:rows] if name in ROWS_OF_TOKENS else w for name, w in ours.items()}


def all_our_weights(hf: nn.Module) -> dict[str, Tensor]:
    """`our_weights` with the rows that `with_added_rows` has added."""
    kind, n_layer, theirs = hf.config.model_type, hf.config.num_hidden_layers, hf.state_dict()
    if kind == "gpt2":
        has_bias = getattr(hf.config, "bias", True)
        return {
            name: w.t() if name.endswith(CONV1D) else w
            for name, w in theirs.items()
            if has_bias or not name.endswith(".bias")
        }
    if kind == "mixtral":
        split_experts(theirs, n_layer)
    ours = {}
    for name, sources in names(kind, n_layer):
        if all(source in theirs for source in sources):  # nanochat's norms contain no weights
            ours[name] = torch.cat([theirs[source] for source in sources])
    return ours


def names(kind: str, n_layer: int) -> Iterator[tuple[str, list[str]]]:
    """
    Yield (our name, their names) of each weight of nanochat, llama and, after `split_experts`, mixtral. Our
    weight is the concatenation of their weights.
    """
    for ours, theirs in NAMES.items():
        yield f"{ours}.weight", [f"{theirs}.weight"]
    for i in range(n_layer):
        ours, theirs = f"transformer.h.{i}.", f"model.layers.{i}."
        yield f"{ours}attn.c_attn.weight", [f"{theirs}{name}.weight" for name in QKV]
        for mine, other in (BLOCK | MLPS[kind]).items():
            yield f"{ours}{mine}.weight", [f"{theirs}{other}.weight"]


def save(folder: Path, model: nn.Module, token_ids: dict) -> None:
    """
    Write config.json, generation_config.json and model.safetensors.

    Args:
        model: a GPT with float32 weights on the CPU.
        token_ids: see tokenizer.save_tokenizer; of these, suppress_tokens may be missing. If one of them is
            beyond the model's, the exported model gets more ids.

    Raises:
        ValueError: transformers contains no class for this model, or its class computes other logits.
    """
    hf = converted(model, token_ids)
    check_logits(model, hf)
    hf.save_pretrained(folder, max_shard_size=FILE_SIZE)


def converted(model: nn.Module, token_ids: dict) -> "PreTrainedModel":
    """
    Make the model of transformers with the weights of a GPT; most tensors are shared. Raises ValueError if
    its class contains other weights than the GPT.
    """
    with needed_by("an export to transformers", "transformers"):
        import transformers

    args, suppressed = model.describe(), token_ids.get("suppress_tokens")
    token_ids = {name: i for name, i in token_ids.items() if name != "suppress_tokens"}
    rows = max(args["vocab_size"], *(i + 1 for i in token_ids.values() if i is not None), 0)
    weights = with_added_rows(model.state_dict(), rows - args["vocab_size"])
    kind = kind_of(args)
    fields = {theirs: args[ours] for theirs, ours in FIELDS_OF[kind].items()} | token_ids
    if rows > args["vocab_size"]:
        fields |= {"vocab_size": rows, "trained_vocab_size": args["vocab_size"]}
    if kind == "gpt2":
        gelu = {"none": "gelu", "tanh": "gelu_new"}[args["gelu"]]
        # llama.cpp's converter reads n_ctx, the former name of n_positions
        fields |= {"n_ctx": args["block_size"], "activation_function": gelu, "bias": args["bias"]}
        config = transformers.GPT2Config(**fields)
    else:
        rope = {"rope_type": "default", "rope_theta": args["rope_theta"]}
        config_class = getattr(transformers, CLASSES[kind]).config_class
        config = config_class(**fields, rope_parameters=rope)
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if kind != "gpt2":  # its frequencies are not weights, and must not stay on the meta device
        hf.model.rotary_emb = type(hf.model.rotary_emb)(config)
    expected = hf.state_dict()
    known = expected if kind == "gpt2" else dict(names(kind, config.num_hidden_layers))
    if unknown := [name for name in weights if name not in known]:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ValueError(
            f"{CLASSES[kind]} of transformers contains no such weights as {', '.join(unknown[:3])}{more}: "
            f"{OTHER_FORMS}"
        )
    try:
        theirs = their_weights(kind, args, weights)
        # GPT-2 without biases gets biases of 0
        zeros = {
            name: torch.zeros(w.shape)
            for name, w in expected.items()
            if name not in theirs and name.endswith(".bias")
        }
        hf.load_state_dict(theirs | zeros, assign=True)
    except (KeyError, RuntimeError) as e:
        reason = " ".join(str(e).split())[:300]
        raise ValueError(
            f"the weights of model.py do not fit {CLASSES[kind]} of transformers: {OTHER_FORMS} ({reason})"
        ) from e
    hf.tie_weights()
    hf.generation_config.suppress_tokens = suppressed
    return hf.eval()


def with_added_rows(weights: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    """
    Add n tokens to a model's weights. Their rows are the mean of the others, so that their logit is the mean
    logit, and a new token's probability is at most the mean probability of the others.
    """
    if not n:
        return weights
    longer = {
        name: torch.cat((weights[name], weights[name].mean(0, keepdim=True).expand(n, -1)))
        for name in ROWS_OF_TOKENS
        if name in weights
    }
    return weights | longer


@torch.no_grad()
def check_logits(model: nn.Module, hf: "PreTrainedModel") -> None:
    """
    Raise ValueError if a GPT and what was made of it for transformers compute different logits for
    pseudo-random tokens, by more than rounding.
    """
    c, was_training, differences = model.config, model.training, []
    model.eval()
    for seed in range(SEQUENCES_WITH_EXPERTS if c.n_expert else 1):
        tokens = pseudo_random_tokens((1, min(c.block_size, CHECKED_TOKENS)), c.vocab_size, seed)  # (1, T)
        logits, _ = model(tokens, tokens)  # (1, T, V)
        their_logits = hf(tokens, use_cache=False).logits[..., : c.vocab_size]
        difference, size = largest_difference(their_logits, logits)
        differences.append(difference)
        if is_rounding(difference, size, torch.float32):
            break
    else:
        name = type(hf).__name__
        raise ValueError(
            f"the logits of {name} and of model.py differ by {min(differences):.2g} (their standard "
            f"deviation is {size:.2g}): the model in model.py computes something that transformers' {name} "
            f"does not: {OTHER_FORMS}"
        )
    model.train(was_training)


def kind_of(args: dict) -> str:
    """
    Return the model_type of a model with these fields of GPTConfig. Raises ValueError if transformers
    contains no such model.
    """
    arch, n_expert = args["arch"], args["n_expert"]
    if n_expert and arch != "llama":
        raise ValueError(
            f"transformers contains no class for arch {arch!r} with n_expert {n_expert}: of "
            f"the models with experts, it contains only 'llama', as MixtralForCausalLM: {OTHER_FORMS}"
        )
    if arch not in CLASSES:
        raise ValueError(
            f"export.py knows no class of transformers for arch {arch!r}, but only for "
            f"{', '.join(CLASSES)}: {OTHER_FORMS}"
        )
    return "mixtral" if n_expert else arch


def their_weights(kind: str, args: dict, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under the names of a transformers model."""
    if args["tied"]:
        weights = weights | {"lm_head.weight": weights["transformer.wte.weight"]}
    if kind == "gpt2":
        return {name: w.t() if name.endswith(CONV1D) else w for name, w in weights.items()}
    config, theirs = GPTConfig(**args), {}
    for ours, targets in names(kind, config.n_layer):
        if ours in weights:
            w = weights[ours]
            parts = w.split(config.qkv_rows) if len(targets) > 1 else [w]
            theirs |= dict(zip(targets, parts, strict=True))
    if kind == "mixtral":
        join_experts(theirs, config)
    return theirs


def split_experts(theirs: dict[str, Tensor], n_layer: int) -> None:
    """
    Replace the three-dimensional weights of Mixtral's experts by matrices with the experts' rows, in place.
    """
    for i in range(n_layer):
        experts = f"model.layers.{i}.mlp.experts."
        gate, up = theirs.pop(f"{experts}gate_up_proj").chunk(2, dim=1)  # (E, H, C) each
        down = theirs.pop(f"{experts}down_proj")  # (E, C, H)
        for name, w in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            theirs[f"{experts}{name}.weight"] = w.flatten(0, 1)


def join_experts(theirs: dict[str, Tensor], config: GPTConfig) -> None:
    """The inverse of `split_experts`."""
    for i in range(config.n_layer):
        experts = f"model.layers.{i}.mlp.experts."
        gate, up, down = (
            theirs.pop(f"{experts}{name}.weight").unflatten(0, (config.n_expert, -1))
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        theirs[f"{experts}gate_up_proj"] = torch.cat((gate, up), dim=1)  # (E, 2 H, C)
        theirs[f"{experts}down_proj"] = down  # (E, C, H)
