"""Override a script's settings with config files and command-line options, applied from left to right.

A script's settings are the plain globals between its first section comment (`# -- run ---`) and its call
`config = configure(globals())`. The comment after each setting describes it and is printed by --help. At its
end, the comment may contain the range of the values in square brackets, see isogpt/options/ranges.py.
"""

import ast
import difflib
import glob
import math
import os
import pkgutil
import re
import reprlib
import shlex
import sys
import textwrap
import time
import tokenize
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from tokenize import COMMENT
from typing import Any, NoReturn

from isogpt.common import console
from isogpt.options import ranges
from isogpt.options.foreign_files import ENDINGS, contains_settings, refusal, settings_for
from isogpt.options.foreign_settings import OFF, ON, UNSET, advice_for, section_of_evaluation, settings_in
from isogpt.options.values import BOOLS, WANTED, Setting, Value, as_typed, coerce, parse, parse_options

SECTION = re.compile(r"# -- (.+?) -+")
CONSTANT = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
# text that is copied from a web page may contain any of these
DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
# a leading ~ is the user's home folder, which a shell replaces in `--key ~/x`, but not in `--key=~/x`
PATHS = frozenset(("out_dir", "dataset", "init_from", "json_path"))
CLOSE = 0.83  # how similar, at most 1, a name must be to be taken for a misspelled setting
# modules and functions that nanoGPT's scripts have imported when they run a config
VISIBLE = {
    "os": "os",
    "sys": "sys",
    "time": "time",
    "math": "math",
    "pickle": "pickle",
    "np": "numpy",
    "torch": "torch",
    "tiktoken": "tiktoken",
    "literal_eval": "ast:literal_eval",
    "nullcontext": "contextlib:nullcontext",
    "DDP": "torch.nn.parallel:DistributedDataParallel",
    "init_process_group": "torch.distributed:init_process_group",
    "destroy_process_group": "torch.distributed:destroy_process_group",
}


@dataclass
class Findings:
    """
    What is wrong with the arguments, in separate lines: problems end the process, notes are only printed.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def settings_of(path: str | os.PathLike) -> dict[str, Setting]:
    """
    Return the settings of the script at `path`, in order. The settings are parsed from the source; the script
    is not run.
    """
    with open(path, "rb") as file:
        comments = {
            token.start[0]: token for token in tokenize.tokenize(file.readline) if token.type == COMMENT
        }
        file.seek(0)
        tree = ast.parse(file.read(), os.fspath(path))
    sections = {row: SECTION.fullmatch(token.line.rstrip()) for row, token in comments.items()}
    calls = [(ast.unparse(node.func), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    end = min(
        (row for name, row in calls if name in ("configure", "configurator.configure")), default=math.inf
    )

    settings = {}
    for node in tree.body:
        section = [match[1] for row, match in sections.items() if match and row < node.lineno][-1:]
        is_setting = section and node.lineno < end and isinstance(node, ast.Assign)
        if not is_setting or not all(isinstance(part, CONSTANT) for part in ast.walk(node.value)):
            continue
        name, value = " = ".join(map(ast.unparse, node.targets)), eval(ast.unparse(node.value))
        if name.isidentifier() and not name.startswith("_") and type(value) in WANTED:
            comment = comments[node.end_lineno].string.lstrip("# ") if node.end_lineno in comments else ""
            meaning, values = ranges.split_comment(comment)
            assert meaning, f"{path}, line {node.lineno}: setting {name} needs a comment that describes it"
            settings[name] = Setting(name, value, meaning, section[0], range=values)
    return settings


def configure(
    script_globals: dict[str, Any], argv: list[str] | None = None, extra: dict[str, Setting] | None = None
) -> dict[str, Value]:
    """
    Apply `argv` to the settings in `script_globals` and return their final values.

    `argv` defaults to the command line. In that case, sys.argv is rewritten with --key=value throughout, the
    only form that code which passes the arguments on to other processes must understand.

    `extra` contains settings of a different script that are also accepted. Settings in `extra` that were set
    are returned, but never assigned to the globals. Their defaults are only shown by --help and read by
    config files. All errors are reported together; then nothing is applied and the process exits with status
    1.
    """
    console.prepare()
    script = script_globals["__file__"]
    own = settings_of(script)
    # the script's settings come first in --help, and take precedence over extra settings of the same name
    known = own | (extra or {}) | own
    arguments = sys.argv[1:] if argv is None else argv
    if "-h" in arguments or "--help" in arguments:
        if _is_rank_0():
            console.print_line(help_text(script, known))
        sys.exit(0)

    arguments = _normalized(arguments, known)
    if argv is None:
        sys.argv[1:] = arguments
    arguments = _without_switches(arguments, known)
    final = {name: script_globals.get(name, setting.default) for name, setting in own.items()}
    findings = Findings()
    for argument in arguments:
        if _split(argument)[0] == "--":
            final |= _from_option(argument, known, findings)
        else:
            current = {name: setting.default for name, setting in known.items()} | final
            final |= _from_config(argument, script_globals, known, current, findings)
    final |= {name: _in_home(final[name]) for name in PATHS & final.keys()}
    # the process that launched torchrun, see launchers.start_workers, has printed the notes
    if _is_rank_0() and not console.is_worker_of_nproc():
        for note in findings.notes:
            print(f"note: {note}", file=sys.stderr, flush=True)
    problems = [f"{os.path.basename(script)}: {problem}" for problem in findings.problems]
    problems += ranges.problems(known, final)
    if problems:
        fail("\n".join(problems))
    script_globals.update({name: final[name] for name in own})
    return final


def fail(message: str) -> NoReturn:
    """Exit with status 1 because of a user's mistake. Rank 0 prints `message` to stderr immediately."""
    source = ""
    if not _is_rank_0():
        # Usually every rank fails with the same message. torchrun kills all workers as soon as one fails, so
        # other ranks must not exit before rank 0 has printed. A rank that survives the wait is the only one
        # with this problem.
        time.sleep(10)
        source = f"rank {os.environ['RANK']}: "
    console.print_error(message, source)
    from isogpt.launch.together import about_restarts  # imports torch, which --help does not need

    if note := about_restarts():
        print(note, file=sys.stderr, flush=True)
    sys.exit(1)


def help_text(script: str | os.PathLike, settings: dict[str, Setting]) -> str:
    """
    Return the text of --help: usage, first paragraph of the script's docstring, and the settings by section.
    """
    with tokenize.open(script) as file:
        docstring = ast.get_docstring(ast.parse(file.read())) or ""
    lines = [f"usage: python {os.path.basename(script)} [config/FILE.py ...] [--key=value ...]"]
    lines += ["Arguments apply from left to right; later values override earlier ones."]
    lines += ["--key value also works, and --key alone sets a boolean to True.", ""]
    lines += textwrap.wrap(docstring.partition("\n\n")[0], 120)
    options = {}
    for name, setting in settings.items():
        options[name] = f"  --{name}={as_typed(setting.default)}  "
    # a long default must not shift every description
    indent = min(50, max(map(len, options.values()), default=0))
    wrapper = textwrap.TextWrapper(
        120, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    for section in dict.fromkeys(setting.section for setting in settings.values()):
        members = [setting for setting in settings.values() if setting.section == section]
        lines += ["", f"{section}:"]
        for it in members:
            lines += wrapper.wrap(options[it.name].ljust(indent) + ranges.described(it))
    return "\n".join(lines).replace(ranges.UNBROKEN, " ")


def _split(argument: str) -> tuple[str, str, str, str]:
    """Split an option: the dashes, the name, the first equals sign if there is one, and the text after it."""
    undashed = argument.lstrip(DASHES)
    return argument[: len(argument) - len(undashed)], *undashed.partition("=")


def _normalized(arguments: list[str], settings: dict[str, Setting]) -> list[str]:
    """
    Rewrite `--key value`, `--key = value`, `--key =value` and `--key= value` as `--key=value`, `--key` alone
    as `--key=True` if the setting is a boolean, and `--config=FILE` as `FILE`.
    """
    rest, rewritten = list(arguments), []
    while rest:
        argument = rest.pop(0)
        dashes, name, equals, text = _split(argument)
        if not dashes:
            rewritten.append(argument)
            continue
        setting = settings.get(name)
        is_config = name == "config" and not setting
        kind = str if is_config else setting.kind if setting else None
        is_number = kind not in (str, None)
        if not equals and rest[:1] == ["="] and len(rest) > 1 and _is_value(rest[1], kind, name):
            rest.pop(0)
        elif not equals and is_number and rest and rest[0].startswith("="):
            rest[0] = rest[0][1:]
        lacks_value = not equals or (is_number and not text)
        if lacks_value and rest and _is_value(rest[0], kind, name):
            equals, text = "=", rest.pop(0)
            while kind in (None, bool) and rest and advice_for(name) and _is_word(rest[0]):
                text = f"{text} {rest.pop(0)}"  # --report_to wandb tensorboard
        elif not equals and kind is bool:
            equals, text = "=", "True"
        rewritten.append(text if is_config and text else f"{dashes}{name}{equals}{text}")
    return rewritten


def _is_value(text: str, kind: type | None, name: str) -> bool:
    """
    Whether `text`, the argument after `--name`, is the value. `kind` is the setting's type, None if unknown.
    """
    if kind is bool:
        is_foreign = bool(advice_for(name)) and _is_word(text)  # --fsdp 'full_shard auto_wrap'
        return text.lower() in (*BOOLS, *ON, *OFF) or is_foreign
    return not text.startswith("--") and (kind is str or not text.endswith(".py"))


def _is_word(text: str) -> bool:
    """
    Whether an argument can only be a value: not an option, an assignment, or the name or the path of a file.
    `full_shard auto_wrap`, transformers' value of --fsdp, is a word too.
    """
    is_number = re.fullmatch(r"[\d.]+(e[-+]?\d+)?", text) is not None
    is_name = not text.startswith(tuple(DASHES)) and not re.search(r"[=./\\]", text)
    return (is_name or is_number) and not os.path.exists(text)


def _without_switches(arguments: list[str], known: dict[str, Setting]) -> list[str]:
    """
    Leave out switches of other tools if the value of a different option says more. DeepSpeed's launcher
    passes on `--deepspeed --deepspeed_config ds.json`.
    """
    advice = {it: advice_for(name) for it in arguments for dashes, name, *_ in [_split(it)] if dashes}
    told = [found for it, found in advice.items() if found and "=" in it and it.lower().endswith(ENDINGS)]
    return [it for it in arguments if "=" in it or _split(it)[1] in known or advice.get(it) not in told]


def _in_home(path: str) -> str:
    """Replace a leading ~ by the user's home folder, also after the `auto:` of init_from."""
    prefix = "auto:" if path.startswith("auto:") else ""
    return prefix + os.path.expanduser(path.removeprefix(prefix))


def _from_option(argument: str, known: dict[str, Setting], findings: Findings) -> dict[str, Value]:
    """Return the setting that `argument`, --key=value, sets."""
    name, equals, text = argument[2:].partition("=")
    problem = None
    if name in known and not equals:
        problem = f"--{name}: missing value; type --{name}=VALUE"
    elif name in PATHS & known.keys() and text.startswith("="):
        problem = f"{argument}: type --{name}={shlex.quote(text.lstrip('='))}"
    elif name in known:
        kind = known[name].kind
        try:
            return {name: parse(text, kind)}
        except ValueError:
            meant = _foreign(name, text, known) if kind is bool and text else ""  # --fsdp=full_shard
            problem = f"--{name}={text!r}: not {WANTED[kind]}{meant}"
    elif name == "config":
        problem = "--config: missing value; type --config=FILE.py, or only FILE.py"
    elif name == "help":  # --help=zero
        problem = f"{argument}: type --help, which describes all settings"
    elif name not in ("local_rank", "local-rank"):  # added by older launchers
        problem = f"--{name}: no such setting{_suggestion(name, text, known)}"
    if problem:
        findings.problems.append(f"command line: {problem}")
    return {}


def _from_config(
    config: str,
    script_globals: dict[str, Any],
    known: dict[str, Setting],
    current: dict[str, Value],
    findings: Findings,
) -> dict[str, Value]:
    """Run the file `config` and return the settings it sets. `current` maps all settings to their values."""
    path = _find_config(config, script_globals["__file__"], known, findings)
    if not path:
        return {}
    visible = {**script_globals, **current, "__file__": path, "config_file": config, "config_keys": [*known]}
    namespace = dict(visible)  # a copy: only valid settings reach the script
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(), path)
        if problems := [f"{config}, {it}" for it in _assigns_nothing(tree, known)]:
            findings.problems += problems
            return {}
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        assigned = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        namespace |= _imported(read - namespace.keys())
        exec(compile(tree, path, "exec"), namespace)
    except (Exception, SystemExit) as error:
        findings.problems.append(_config_error(config, path, error))
        return {}

    taken = {}
    for name, before in current.items():
        try:
            value = coerce(namespace.get(name), known[name].kind)
            if name in assigned or value != before:  # set without an assignment: import *, globals()[name]
                taken[name] = value
        except ValueError:
            shown = " ".join(reprlib.repr(namespace.get(name)).split())
            meant = ""
            if advice_for(name):  # fsdp = 'full_shard'
                meant = _lines(settings_for(name, str(namespace.get(name)), known))
            problem = f"{config}: {name} = {shown}: not {WANTED[known[name].kind]}"
            findings.problems.append(f"{problem}; write {meant}" if meant else problem)
    # A plain value that the file does not read is not a helper. It may be meant as a setting, or be a
    # variable that a different program reads: nanoGPT accepts both.
    plain = {name for name, it in namespace.items() if isinstance(it, Value) and it is not visible.get(name)}
    for name in sorted(plain - current.keys() - read):
        nearest = difflib.get_close_matches(name, current, 1, 0.85)
        foreign = _lines(settings_for(name, str(namespace[name]), known))
        if (nearest or foreign) and not name.startswith("_"):
            meant = f"did you mean {nearest[0]}?" if nearest else f"write {foreign}"
            findings.notes.append(f"{config}: {name} is not used: no such setting; {meant}")
    return taken


def _lines(settings: dict[str, Value]) -> str:
    """How a config assigns `settings`."""
    return ", ".join(f"{name} = {value!r}" for name, value in settings.items())


def _imported(names: set[str]) -> dict[str, Any]:
    """The values of those `names` that nanoGPT's scripts have imported."""
    found = {}
    for name in names & VISIBLE.keys():
        with suppress(ImportError):  # not installed: the config raises NameError
            found[name] = pkgutil.resolve_name(VISIBLE[name])
    return found


def _config_error(config: str, path: str, error: BaseException) -> str:
    """One line about the exception that a config file raised, with the number of the line."""
    rows = [row for frame, row in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    text = str(error)
    if isinstance(error, SyntaxError):
        if error.filename == path:
            rows, text = [error.lineno], error.msg
        if not _is_utf8(path):
            return f"{config}: not a text file in UTF-8: save it in this encoding"
    line = f", line {rows[-1]}" if rows else ""
    return f"{config}{line}: {type(error).__name__}: {' '.join(text.split())}"


def _assigns_nothing(tree: ast.Module, known: dict[str, Setting]) -> list[str]:
    """
    A sentence for each annotation without a value, such as `batch_size: 32`, that is meant as an assignment.
    Python would ignore this line. The type of a helper, as in `count: int`, is allowed.
    """
    found, rest = [], list(tree.body)
    while rest:
        node = rest.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        rest += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        if not isinstance(node, ast.AnnAssign) or node.value is not None:
            continue
        name, annotation = ast.unparse(node.target), ast.unparse(node.annotation)
        if name in known or isinstance(node.annotation, ast.Constant | ast.UnaryOp | ast.List | ast.Dict):
            value = "VALUE" if annotation in ("int", "float", "bool", "str") else annotation
            found.append(f"line {node.lineno}: {name}: {annotation} assigns nothing: write {name} = {value}")
    return found


def _is_utf8(path: str) -> bool:
    """Whether a file is text in UTF-8, unlike what Windows' editors and shells may write."""
    with open(path, "rb") as file:
        content = file.read()
    try:
        return "\0" not in content.decode()  # UTF-16 without a byte order mark
    except UnicodeDecodeError:
        return False


def _find_config(config: str, script: str, known: dict[str, Setting], findings: Findings) -> str | None:
    """
    Return the full path of a config file, which is relative to the working directory or to the script's.
    """
    places = [os.path.abspath(config), os.path.join(os.path.dirname(os.path.abspath(script)), config)]
    places = list(dict.fromkeys(places))
    if config.lower().endswith(ENDINGS):
        findings.problems.append(refusal(config, next(filter(os.path.isfile, places), None), known))
        return None
    if found := next(filter(os.path.isfile, places), None):
        return found
    dashes, name, equals, text = _split(config)
    if name in known and (dashes or equals):
        value = shlex.quote(text) if equals else "VALUE"
        problem = f"command line: {config}: type --{name}={value}"
        if equals and text:
            refused = Findings()
            _from_option(f"--{name}={text}", known, refused)
            problem = next(iter(refused.problems), problem)
    elif dashes and name == "help":
        problem = f"command line: {config}: type --help"
    elif dashes or (equals and not config.endswith(".py")):
        problem = f"command line: {config}: no such setting{_suggestion(name, text, known)}"
    elif folder := next(filter(os.path.isdir, places), None):
        problem = f"{config}: a folder, not a config file"
        if files := sorted(glob.glob("*.py", root_dir=folder)):
            problem += (
                f"; type the name of a file in it: {', '.join(files[:5])}{', ...' if len(files) > 5 else ''}"
            )
        elif "out_dir" in known:
            problem += f"; for the folder of a run, type --out_dir={shlex.quote(config)}"
    else:
        problem = f"{config}: no such config file; looked for {' and '.join(places)}"
        folders = [os.path.dirname(place) for place in places]
        folders += [os.path.join(folder, "config") for folder in folders]
        for folder in dict.fromkeys(folders):
            near = difflib.get_close_matches(
                os.path.basename(config), sorted(glob.glob("*.py", root_dir=folder))
            )
            problem += f"; {folder} contains {', '.join(near)}" if near else ""
    findings.problems.append(problem)
    return None


def _suggestion(name: str, text: str, settings: dict[str, Setting]) -> str:
    """
    Return what was probably meant by an unknown name and its value, as the end of a sentence; empty if
    nothing is similar.
    """
    name = name.replace("-", "_")
    negated = re.sub("^(no|disable)_", "", name)
    if negated != name and negated in settings and settings[negated].kind is bool:
        return f"; type --{negated}=False"
    if foreign := _foreign(name, text, settings):
        return foreign
    last = name.rpartition(".")[2]  # litgpt's train.save_interval
    if last != name and last in settings and section_of_evaluation(name) is None:
        return f"; type --{last}={shlex.quote(text) or 'VALUE'}"
    # abbreviations such as bs
    short = [other for other in settings if "".join(word[0] for word in other.split("_") if word) == name]
    swapped = [other for other in settings if sorted(other) == sorted(name)]  # fdsp
    near = short or swapped or difflib.get_close_matches(name.lower(), settings, 1, CLOSE)
    return f"; did you mean --{near[0]}?" if near else ""


def _foreign(name: str, text: str, settings: dict[str, Setting]) -> str:
    """What to type for a setting of a different tool, as the end of a sentence; empty if it is not known."""
    for advice in advice_for(name):
        options = advice.options("" if text in UNSET and not advice.translates(text) else text)
        if not settings.keys() >= set(settings_in(options)):
            continue
        if advice.is_left_out(text):
            return "; leave this option out"
        try:
            parse_options(options, settings)
        except ValueError:  # a value that only the different tool knows
            options = advice.options("")
        is_file = text.lower().endswith(ENDINGS) and os.path.isfile(text)
        if is_file and contains_settings(text, settings):  # --deepspeed_config=ds.json
            return f"; {refusal(text, text, settings)}"
        if not options:
            return f"; {advice.why}"
        return f"; type {options}{f' ({advice.why})' if advice.why else ''}"
    return ""


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") in ("", "0")
