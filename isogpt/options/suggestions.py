"""Which setting was meant by a name that is not one: names in other tools, and misspellings."""

import difflib
from collections.abc import Mapping

from isogpt.options.values import Setting

# Setting -> its names in transformers, accelerate, DeepSpeed, Lightning, torchtitan, nanochat and llm.c.
# Names that are spelled alike are left out. docs/migrating.md lists more names, with their values.
OTHER_NAMES = {
    "out_dir": "default_root_dir dump_folder",
    "device": "accelerator use_cpu",
    "dtype": "bf16 fp16 mixed_precision precision",
    "compile": "torch_compile dynamo_backend",
    "nproc": "num_processes devices num_gpus",
    "init_from": "resume resume_from_checkpoint ckpt_path model_name_or_path",
    "save_interval": "save_steps save_every",
    "keep_last": "save_total_limit",
    "eval_interval": "eval_steps eval_every val_loss_every",
    "eval_iters": "limit_val_batches",
    "log_interval": "logging_steps log_every_n_steps steps_per_print log_freq",
    "wandb_log": "report_to use_wandb",
    "wandb_run_name": "run_name",
    "dataset": "train_file data_path input_bin",
    "batch_size": "device_batch_size bs",
    "gradient_accumulation_steps": "grad_accum_steps accumulate_grad_batches total_batch_size",
    "block_size": "seq_len max_seq_len max_seq_length sequence_length",
    "zero": "zero_stage deepspeed strategy sharding_strategy",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
    "activation_checkpointing": "gradient_checkpointing",
    "n_layer": "depth num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size d_model",
    "learning_rate": "lr",
    "max_iters": "steps max_steps train_steps train_iters num_iterations total_steps",
    "max_tokens": "tokens total_tokens train_tokens num_tokens target_tokens",
    "max_epochs": "epochs num_epochs num_train_epochs train_epochs",
    "grad_clip": "max_grad_norm max_norm gradient_clip_val gradient_clipping",
}
SIMILAR = 0.75  # at most 1; two letters that are swapped in a name of four give 0.75


def nearest(name: str, settings: Mapping[str, Setting]) -> str:
    """
    The setting that was probably meant by `name`, or SETTING=False for no_SETTING; "" if none is similar.
    Sections before a dot are left out, as in torchtitan's training.steps.
    """
    name = name.lower().replace("-", "_").rpartition(".")[2]
    if name in settings:
        return name
    negated = name.removeprefix("no_")
    if negated in settings and settings[negated].kind is bool:
        return f"{negated}=False"
    for setting, others in OTHER_NAMES.items():
        if setting in settings and name in others.split():
            return setting
    return next(iter(difflib.get_close_matches(name, settings, 1, SIMILAR)), "")
