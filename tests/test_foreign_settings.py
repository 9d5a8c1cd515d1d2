"""isogpt/options/foreign_settings.py: the advice for settings of other tools is accepted when typed."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from runs import REPO, accepted

from configurator import settings_of
from isogpt.launch.launchers import print_unapplied_settings
from isogpt.options.foreign_settings import OFF, ROWS, TABLE, advice_for, settings_in, unapplied_settings
from isogpt.training.settings import check_sampling

SCRIPTS = {name: settings_of(REPO / name) for name in ("train.py", "sample.py", "bench.py")}
# what was typed in trials, and what the message advises
TRIALS = {
    "--world_size 4": "--nproc=4",
    "--gradient_checkpointing": "--activation_checkpointing=full",
    "--gradient_checkpointing False": "--activation_checkpointing=none",
    "--total_steps 100": "--max_iters=100 --lr_decay_iters=100",
    "--deepspeed": "--zero=2",
    "--deepspeed_config ds.json": "--zero=2",
    "--distributed": "--nproc=2",
    "--use_wandb": "--wandb_log=True",
    "--report_to none": "--wandb_log=False",
    "--no_wandb": "--wandb_log=False",
    "--train_data_path texts/a": "--dataset=texts/a",
    "--max_grad_norm 0.5": "--grad_clip=0.5",
    "--mixed_precision bf16": "--dtype=bfloat16",
    "--mixed_precision=no": "--dtype=float32",
    "--bf16": "--dtype=bfloat16",
    "--bf16 False": "--dtype=float32",
    "--lr 3e-4": "--learning_rate=3e-4",
    "--lr fast": "--learning_rate=6e-4",
    "--epochs 3": "--max_iters=5000 --lr_decay_iters=5000",
    "--num_processes 2": "--nproc=2",
    "--num_gpus 8": "--nproc=8",
    "--nproc_per_node=8": "--nproc=8",
    "--nproc-per-node=8": "--nproc=8",
    "--zero_stage 3": "--zero=3",
    "--tensor_parallel_size 2": "--tp=2",
    "--parallelism.tensor_parallel_degree 2": "--tp=2",
    "--resume_from x": "--init_from=resume",
    "--resume_from_checkpoint x": "--init_from=resume",
    "--save_steps 50": "--save_interval=50",
    "--train.save_interval 50": "--save_interval=50",
    "--checkpoint.interval 50": "--save_interval=50",
    "--logging_steps 5": "--log_interval=5",
    "--checkpoint_interval 5": "--save_interval=5",
    "--sharding_strategy FULL_SHARD": "--zero=3",
    "--fsdp_sharding_strategy SHARD_GRAD_OP": "--zero=2",
    "--fsdp='full_shard auto_wrap'": "--zero=3",
    "--fsdp 'full_shard auto_wrap'": "--zero=3",
    "--fsdp full_shard auto_wrap": "--zero=3",
    "--fsdp full_shard": "--zero=3",
    "--fsdp=full_shard": "--zero=3",
    "-fsdp full_shard": "--zero=3",
    "--fsdp 'shard_grad_op offload'": "--zero=2 --cpu_offload=True",
    "--fsdp 'full_shard offload auto_wrap'": "--zero=3 --cpu_offload=True",
    "--fsdp 'hybrid_shard auto_wrap'": "--zero=3 --dp_replicate=2",
    "--deepspeed none.json": "--zero=2",
    "--report_to wandb tensorboard": "--wandb_log=True --tensorboard_log=True",
    "--betas 0.9 0.95": "--beta1=0.9 --beta2=0.95",
    "--use_linear_scaling": "--lr_scaling=linear --base_batch=480",
    "--diloco_workers 4": "--islands=4 --local_steps=50",
    "--diloco.num_workers=4": "--islands=4 --local_steps=50",
    "--diloco": "--islands=2 --local_steps=50",
    "--diloco.inner_steps 100": "--islands=2 --local_steps=100",
    "--output_dir 'my runs'": "--out_dir='my runs'",
    "--fsdp_offload_params true": "--zero=3 --cpu_offload=True",
    "--fsdp_offload_params false": "--cpu_offload=False",
    "--offload_optimizer_device none": "--cpu_offload=False",
    "--wandb_mode=offline": "--wandb_log=True",
    "--wandb_mode=disabled": "--wandb_log=False",
    "--strategy=ddp": "--zero=0",
    "--strategy=fsdp": "--fsdp=True",
    "--strategy=deepspeed_stage_2_offload": "--zero=2 --cpu_offload=True",
    "--trainer.strategy=deepspeed_stage_3": "--zero=3",
    "--accelerator=gpu": "--device=cuda",
    "--accelerator cpu": "--device=cpu",
    "--trainer.accelerator=auto": "--device=auto",
    "--precision=16-mixed": "--dtype=float16",
    "--accumulate_grad_batches=4": "--gradient_accumulation_steps=4",
    "--seed_everything=7": "--seed=7",
    "--fast_dev_run": "--max_iters=1 --eval_iters=1",
    "--enable_checkpointing=False": "--save_checkpoint=False",
    "--auto_scale_batch_size": "--layout=auto",
    "--detect_anomaly": "--on_nan=stop",
    "--lr_scheduler_type=constant_with_warmup": "--lr_schedule=wsd --cooldown_iters=1",
    "--tie_word_embeddings False": "--arch=llama --head=untied",
    "--untie_embeddings_and_output_weights": "--arch=llama --head=untied",
    "--use_cuda False": "--device=cpu",
    "--gpu_id 1": "--device=cuda:1",
    "--strategy deepspeed_stage_3_offload": "--zero=3 --cpu_offload=True",
    "--max_steps -1": "--max_iters=5000 --lr_decay_iters=5000",
    "--num_processes -1": "--nproc=2",
    "--save_steps 0.1": "--save_interval=500",
    "--min_lr_ratio 0.1": "--min_lr=6e-5",
    "--reduce_bucket_size 5e8": "--ddp_bucket_mb=25",
    "--validation.steps 10": "--eval_iters=10",
    "--validation.freq 20": "--eval_interval=20",
}


@pytest.fixture(autouse=True)
def parsed_once(monkeypatch):
    """The scripts are parsed once for all tests of this file, not for each call of configure."""
    monkeypatch.setattr("configurator.settings_of", lambda path: SCRIPTS[Path(path).name])


def refusals(capsys, *args, script="train.py"):
    """The lines with which a script refuses arguments."""
    with pytest.raises(SystemExit):
        accepted(script, *args)
    return capsys.readouterr().err.splitlines()


def said(capsys, script, *args):
    """The one line with which a script refuses arguments."""
    (line,) = refusals(capsys, *args, script=script)
    return line


@pytest.mark.parametrize("typed", TRIALS)
def test_what_was_typed_in_trials(typed, capsys):
    line = said(capsys, "train.py", *shlex.split(typed))
    advised = re.search(r"; type (.+?)(?: \(|$)", line)[1]
    assert advised == TRIALS[typed]
    accepted("train.py", *shlex.split(advised))


def test_all_advice_is_accepted_when_typed():
    """Each row of the table, with its example and for each of its values, in each script that it is for."""
    for names, advice in ROWS:
        used = 0
        for options in {advice.options(""), *map(advice.options, advice.values)}:
            scripts = [name for name in SCRIPTS if set(settings_in(options)) <= SCRIPTS[name].keys()]
            used += bool(scripts)
            for name in scripts if options else ():
                config = accepted(name, *shlex.split(options))
                if name == "sample.py":
                    check_sampling(config)
        assert used, f"no script has the settings of {names}"
        assert advice.typed or advice.why, names


def test_the_table_contains_no_name_twice_and_no_setting_of_train():
    for names, _ in ROWS:
        assert len(names.split()) == len(set(names.split())), names
    for name, advice in TABLE.items():
        typed = [sorted(settings_in(one.options(""))) for one in advice]
        assert len(typed) == len({tuple(one) for one in typed}), name
    assert TABLE.keys() & SCRIPTS["train.py"].keys() == {"fsdp"}  # whose value may be that of transformers


@pytest.mark.parametrize(
    ("typed", "end"),
    [
        (
            "--nnodes=2",
            "an option of the launcher stands before the script: torchrun --nnodes=2 ... train.py",
        ),
        ("--find_unused_parameters", "not needed: each step uses all parameters, and there are no buffers"),
        (
            "--do_eval",
            "not needed: a run evaluates at each eval_interval; without training: --eval_only=True",
        ),
        ("--use_fsdp=False", "leave this option out"),
        ("--use_fsdp=0", "leave this option out"),
        ("--num_workers=0", "not needed: a thread reads the next batches from the mapped files"),
        ("--validation.seq_len=8", ""),
        ("--eval.batch_size=8", ""),
        ("--fsdp_config=none.json", "not needed with --zero=2 or 3: each block is sharded, from the start"),
        ("--momentu=1", ""),
        ("--deepseed", ""),
        ("--zzz", ""),
    ],
)
def test_nothing_to_type(typed, end, capsys):
    """Names that are not near to a setting get no advice, rather than a wrong one."""
    name = typed.partition("=")[0]
    line = said(capsys, "train.py", typed)
    assert line == f"error: train.py: command line: {name}: no such setting" + (f"; {end}" if end else "")


def test_a_value_after_a_space_is_named(capsys):
    line = said(capsys, "train.py", "--fsdp", "full_shard auto_wrap", "--max_iters=5")
    found = "error: train.py: command line: --fsdp='full_shard auto_wrap': not True or False"
    assert line == f"{found}; type --zero=3"
    assert said(capsys, "train.py", "--compile", "off").endswith("--compile='off': not True or False")
    assert said(capsys, "train.py", "--fsdp", "").endswith("--fsdp='': not True or False")


def test_a_config_after_a_switch_is_not_the_switchs_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plain").write_text("seed = 7")
    for config in ("plain", "config/train_shakespeare_char.py"):
        config = accepted("train.py", "--fsdp", config)
        assert config["fsdp"] and (config["seed"], config["dataset"]) != (1337, "openwebtext")


def test_what_deepspeeds_launcher_passes_on_is_one_problem(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    line = said(capsys, "train.py", "--deepspeed", "--deepspeed_config", "ds.json")
    assert line.startswith("error: train.py: command line: --deepspeed_config: no such setting; ds.json: ")
    assert line == said(capsys, "train.py", "--deepspeed_config=ds.json")
    (fsdp, config) = refusals(capsys, "--fsdp", "full_shard auto_wrap", "--fsdp_config", "ds.json")
    assert fsdp.endswith("type --zero=3") and "--fsdp_config: no such setting; ds.json: " in config
    (first, second) = refusals(capsys, "--deepspeed", "--zzz=ds.json")
    assert "type --zero=2" in first and second.endswith("--zzz: no such setting")


def test_the_scripts_have_different_advice(capsys):
    assert "type --max_new_tokens=50" in said(capsys, "sample.py", "--max_tokens=50")
    assert "type --max_iters=5000" in said(capsys, "train.py", "--max_tokens=50")
    assert "type --start='once upon'" in said(capsys, "sample.py", "--prompt", "once upon")


def test_values_of_other_tools():
    (advice,) = advice_for("fp16")
    assert {advice.options(word) for word in OFF} == {"--dtype=float32"}
    assert advice_for("optimizer.lr") == advice_for("lr") and not advice_for("optimizer.zzz")


def test_help_does_not_import_torch():
    code = "import sys, configurator, isogpt.options.foreign_settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0


def launched_by_accelerate(**more):
    """The variables of `accelerate launch` on 2 processes, and what it sets if nobody chose anything."""
    env = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "False", "WORLD_SIZE": "2"}
    return env | {"ACCELERATE_DYNAMO_BACKEND": "NO"} | more


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD"}
FSDP |= {"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}
PARALLEL = {"PARALLELISM_CONFIG_TP_SIZE": "2", "PARALLELISM_CONFIG_CP_SIZE": "1"}


@pytest.mark.parametrize(
    ("env", "advised"),
    [
        ({}, ""),
        (FSDP, "--zero=3"),
        (FSDP | {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, "--zero=2"),
        (
            FSDP | {"FSDP_SHARDING_STRATEGY": "1", "FSDP_OFFLOAD_PARAMS": "true"},
            "--zero=3 --cpu_offload=True",
        ),
        (FSDP | {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, "--zero=2"),
        (FSDP | {"ACCELERATE_USE_FSDP": "false"}, ""),
        (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "--zero=3 --activation_checkpointing=full"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "--dtype=float16"),
        (DEEPSPEED, "--zero=1"),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, ""),
        (
            DEEPSPEED | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            "--gradient_accumulation_steps=8 --zero=1",
        ),
        (
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "WORLD_SIZE": ""},
            "--gradient_accumulation_steps=4",
        ),
        (DEEPSPEED | {"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, "--zero=1"),
        (PARALLEL, ""),
        (PARALLEL | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "--tp=2"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_PP_DEGREE": "2"}, "--pp=2"),
    ],
)
def test_what_accelerate_passes_on_is_not_dropped_silently(env, advised):
    """The sentence names what is dropped. With the advice, which is accepted, nothing is dropped any more."""
    env = launched_by_accelerate(**env)
    sentence = unapplied_settings(accepted("train.py"), env)
    assert sentence.partition(": type ")[2] == advised
    assert bool(sentence) == bool(advised)
    assert not unapplied_settings(accepted("train.py", *advised.split()), env)


def test_a_layout_that_is_planned_does_not_follow_accelerate():
    env = launched_by_accelerate(**FSDP)
    assert not unapplied_settings(accepted("train.py", "--layout=auto"), env)
    assert not unapplied_settings(accepted("train.py", "--fsdp"), env)


def test_deepspeeds_config_is_read_for_the_advice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    content = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_clipping": 0.5}
    Path("ds.json").write_text(json.dumps(content | {"train_micro_batch_size_per_gpu": "auto"}))
    env = DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}
    assert unapplied_settings(accepted("train.py"), env).endswith("type --zero=3")
    env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = "none.json"
    assert unapplied_settings(accepted("train.py"), env).endswith("type --zero=2")
    line = said(capsys, "train.py", "--deepspeed_config", "ds.json")
    advice = "type --zero=3 --dtype=bfloat16 --grad_clip=0.5, or write ds.py with lines such as zero = 3"
    assert line.endswith(f"{advice}; not translated (1): train_micro_batch_size_per_gpu")


def test_a_number_for_each_gpu_in_a_config_is_not_copied_without_a_word(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps({"gradient_accumulation_steps": 4, "gradient_clipping": 0.5}))
    line = said(capsys, "train.py", "ds.json")
    end = "multiply a number for each GPU by the number of GPUs"
    assert "such as gradient_accumulation_steps = 4; gradient_accumulation_steps counts" in line
    assert line.endswith(f" counts over all processes: {end}")
    # DeepSpeed's train_batch_size counts over all processes too, so there is nothing to multiply
    Path("ds.json").write_text(json.dumps({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}))
    line = said(capsys, "train.py", "ds.json")
    assert "type --batch_size=4 --gradient_accumulation_steps=16, or" in line and "multiply" not in line


DEEPSPEEDS_FILE = {
    "fp16": {"enabled": True, "loss_scale": 0},
    "bf16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.99], "weight_decay": 0.2}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
}
ACCELERATES_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_offload_params: true  # on the CPU
  fsdp_sharding_strategy: SHARD_GRAD_OP
mixed_precision: 'bf16'
num_processes: 8
"""
TORCHTITANS_FILE = """
[training]
steps = 100
seq_len = 64
[activation_checkpoint]
mode = "selective"
[parallelism]
tensor_parallel_degree = 2
[validation]
steps = [1, 2]
dataset = "c4_validation"
local_batch_size = 8
batch_size = 8
seq_len = 2048
freq = 5
eval_iters = 3
"""


HYDRAS_FILE = """
defaults:
  - model: small
  - _self_
shared: &shared {lr: 3e-4, seed: 0x7}
optim: !adam
  <<: *shared
  betas:
  - 0.8  # of the first moment
  - 0.99
datasets:
- {path: a.txt}
report_to: [wandb, tensorboard]
trainer:
  max_steps: 1_000
  callbacks: [a, b]
  output_dir: "${root}/out"
"""
ALIASES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 40))
INIS_SETTINGS = {"learning_rate": 0.2, "save_interval": 7}
HYDRAS_SETTINGS = {
    **{"learning_rate": 3e-4, "seed": 7, "beta1": 0.8, "beta2": 0.99, "max_iters": 1000},
    **{"lr_decay_iters": 1000, "out_dir": "${root}/out", "wandb_log": True, "tensorboard_log": True},
}


@pytest.mark.parametrize(
    ("name", "text", "advised", "others"),
    [
        (
            "ds.json",
            json.dumps(DEEPSPEEDS_FILE),
            {"dtype": "float16", "learning_rate": 1e-4, "weight_decay": 0.2, "zero": 2, "cpu_offload": True}
            | {"batch_size": 4, "grad_clip": 0.5, "log_interval": 10, "profile": False}
            | {"optimizer": "adamw", "beta1": 0.8, "beta2": 0.99},
            "fp16.loss_scale, train_batch_size",
        ),
        (
            "whole.json",
            '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}',
            {"batch_size": 4, "gradient_accumulation_steps": 16},
            "",
        ),
        (
            "odd.json",  # no whole number of micro-batches
            '{"train_batch_size": 62, "train_micro_batch_size_per_gpu": 4}',
            {"batch_size": 4},
            "train_batch_size",
        ),
        (
            "lightning.yaml",
            "trainer:\n  accelerator: gpu\n  devices: 2\n  strategy: ddp\n  precision: bf16-mixed\n"
            "  max_epochs: 3\n",
            {"device": "cuda", "nproc": 2, "zero": 0, "dtype": "bfloat16"},
            "trainer.max_epochs",
        ),
        (
            "scheduler.json",
            '{"scheduler": {"type": "WarmupDecayLR",\t"params": {"warmup_max_lr": 3e-4}}}',
            {"lr_schedule": "linear", "learning_rate": 3e-4},
            "",
        ),
        (
            "accelerate.yaml",
            ACCELERATES_FILE,
            {"zero": 2, "cpu_offload": True, "dtype": "bfloat16", "nproc": 8},
            "compute_environment",
        ),
        (
            "titan.toml",
            TORCHTITANS_FILE,
            {"max_iters": 100, "lr_decay_iters": 100, "block_size": 64, "tp": 2}
            | {"activation_checkpointing": "selective", "eval_interval": 5, "eval_iters": 3},
            "validation.steps, validation.dataset, validation.local_batch_size, validation.batch_size, "
            "validation.seq_len",
        ),
        (
            "lit.yml",
            "train:\n  save_interval: 50\n  epochs: 3\neval:\n  interval: 70\n  max_iters: 20\n",
            {"save_interval": 50, "eval_interval": 70, "eval_iters": 20},
            "train.epochs",
        ),
        ("hydra.yaml", HYDRAS_FILE, HYDRAS_SETTINGS, "defaults, datasets, trainer.callbacks"),
        (
            "x.ini",
            "lr = 0.1  # high\n[train]\nsave_steps: 7\nmixed",
            {"learning_rate": 0.1, "save_interval": 7},
            "train.mixed",
        ),
        ("x.ini", "lr = 0.1\nseed = 7\n[train]\nlr = 0.2\nseed = 7", {"learning_rate": 0.2, "seed": 7}, ""),
        ("bom.toml", "\ufefflr = 0.1", {"learning_rate": 0.1}, ""),
        ("bom.ini", "\ufefflr = 0.1", {"learning_rate": 0.1}, ""),
        (
            "arguments.json",
            '{"output_dir": "run", "logging_dir": "run/logs", "seed": 1, "data_seed": 2}',
            {"out_dir": "run", "seed": 1},
            "",
        ),
        ("titan.toml", '[checkpoint]\nfolder = "states"', {"out_dir": "states"}, ""),
        (
            "units.json",
            '{"min_lr_ratio": 0.1, "reduce_bucket_size": 5e8, "save_steps": 0.1, "lr": 0.1}',
            {"learning_rate": 0.1},
            "min_lr_ratio, reduce_bucket_size, save_steps",
        ),
        (
            "x.cfg",
            "[a]\nlr=0.1\n[b]\nlr=0.2\n[train]\nSave_Steps=7",
            {"learning_rate": 0.2, "save_interval": 7},
            "",
        ),
    ],
)
def test_files_of_other_tools_are_translated_whole(
    tmp_path, monkeypatch, capsys, name, text, advised, others
):
    """All settings with a translation are on the line, which is accepted. The others are named."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    line = said(capsys, "train.py", name)
    typed = shlex.split(re.search(r" type (.+?), or write ", line)[1])
    assert {option[2:].partition("=")[0] for option in typed} == advised.keys()
    config = accepted("train.py", *typed)
    assert {key: config[key] for key in advised} == advised
    if others:
        assert line.endswith(f"; not translated ({len(others.split())}): {others}")
    else:
        assert "not translated" not in line


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("x.yaml", b"a: b: c", "line 1: mapping values are not allowed here"),
        ("x.yml", b"a:\n\t- 1", "line 2: found character '\\t' that cannot start any token"),
        ("x.json", b'{"a": 1', "line 1: expected ',' or '}', but got '<stream end>'"),
        ("x.json", b"{" + b'"a": {' * 5000, "it is nested too deeply"),
        ("x.toml", b"[a", "Expected ']' at the end of a table declaration (at end of document)"),
        ("x.ini", b"[a]\n  = 1\n", "Source contains parsing errors"),
        ("x.yaml", b"a: \x07", "it contains a character that YAML does not allow"),
        ("x.yaml", b"lr: 1\n# \xff", "it is not a text file in UTF-8"),
        ("x.json", b"", None),
        ("x.yaml", b"- 1\n- [2]", None),
        ("x.json", b"[[1]]", None),
        ("x.json", b"3", None),
        ("x.ini", b"", None),
        ("x.yaml", ALIASES.encode(), "it contains more than 10,000 names"),
    ],
)
def test_files_without_settings(tmp_path, monkeypatch, capsys, name, content, why):
    """One line, which says why the settings could not be read, and how a config is written."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    reason = rf" \(its settings could not be read: {re.escape(why)}.*\)" if why else ""
    line = said(capsys, "train.py", name)
    start = rf"error: train.py: {name}: a config is a Python file{reason}: write x.py with lines such as "
    assert re.fullmatch(f"{start}batch_size = 32", line), line


def test_the_names_without_a_translation_stay_on_one_short_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("x.json").write_text(json.dumps({"a\nb\x1b[31m": 1} | {f"token{i}": i for i in range(9000)}))
    line = said(capsys, "train.py", "x.json")
    assert "; not translated (9001): 'a\\nb\\x1b[31m', token0, token1, " in line and line.endswith(", ...")
    assert line.isprintable() and len(line) < 500


def test_the_advice_does_not_overwrite_a_script(tmp_path, monkeypatch, capsys):
    """Where train.py is, train.yaml is not advised to become train.py. A missing file is named."""
    monkeypatch.chdir(REPO)
    line = said(capsys, "train.py", "train.yaml")
    assert "train.yaml: no such file; a config is a Python file: write train_config.py with lines" in line


def test_yaml_without_pyyaml(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "yaml", None)  # importing it raises ImportError
    Path("x.yaml").write_text("lr: 1")
    assert "could not be read: pip install pyyaml): write x.py" in said(capsys, "train.py", "x.yaml")


def test_a_file_without_a_translation_has_an_example_that_the_script_accepts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("x.json").write_text('{"a": 1}')
    for script in SCRIPTS:
        line = said(capsys, script, "x.json")
        Path("x.py").write_text(re.search("lines such as (.*); not translated [(]1[)]: a$", line)[1])
        assert accepted(script, "x.py") != accepted(script)


def test_the_warning_is_printed_once(monkeypatch, capsys):
    for rank in ("0", "1"):
        for name, value in launched_by_accelerate(**FSDP, RANK=rank).items():
            monkeypatch.setenv(name, value)
        print_unapplied_settings(accepted("train.py"))
    reason = "not applied, since train.py reads only its arguments and configs: type --zero=3"
    assert capsys.readouterr().err == f"warning: accelerate's FSDP_SHARDING_STRATEGY=FULL_SHARD: {reason}\n"
