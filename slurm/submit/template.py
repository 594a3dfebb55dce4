"""A ready job script as data: which keys it takes, and the script with their values written in. Pure.

A template is a batch script that works as it stands (``sbatch NAME.sbatch train.py``). Its keys are

- the options of its ``#SBATCH`` lines, and any other that sbatch_options knows;
- its settings: lines ``NAME=${NAME:-default}  # what it is`` (``:?`` where there is no default);
- ``setup``: a file of shell lines to be read first, in place of the line ``# source …``.

A line ``# teardown: …`` is where shell lines go that run the command ``launch`` and more after it. ``"$@"`` is where
the command goes. Every value is checked, and quoted for who reads it (the shell, or sbatch), so no value can become a
line or a command of its own.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.submit import sbatch_options, template_settings

_SBATCH = re.compile(r"^#SBATCH\s+(--?[\w-]+)(?:[= ]\s*(.*?))?\s*$")
_SETTING = re.compile(r"^([A-Z][A-Z0-9_]*)=\$\{\1:([-?])([^}]*)\}(?:[ \t]+# (.*))?$")
_SETUP = re.compile(r"^# source \S")
_TEARDOWN = re.compile(r"^# teardown: ")
_COMMAND = '"$@"'
_SHORT = {"-J": "job_name", "-N": "nodes", "-t": "time", "-p": "partition", "-A": "account", "-o": "output"}


@dataclass(frozen=True)
class TemplateSetting:
    """A setting. ``default``: None where one must be given."""

    key: str
    default: str | None
    help: str

    @property
    def variable(self) -> str:
        """Return the shell's name of it."""
        return self.key.upper()


@dataclass(frozen=True)
class Template:
    """A job script. ``options``: those of its #SBATCH lines, switches as "true"."""

    name: str
    text: str
    about: str
    options: Mapping[str, str]
    settings: tuple[TemplateSetting, ...]
    takes_command: bool
    takes_setup: bool

    @property
    def summary(self) -> str:
        """Return the first sentence of its comment."""
        return re.split(r"(?<=\.) ", self.about.replace("\n", " "), maxsplit=1)[0]

    @property
    def keys(self) -> list[str]:
        """Return every key that it takes."""
        settings = [setting.key for setting in self.settings]
        return [*settings, *(["setup"] if self.takes_setup else []), *sbatch_options.BY_KEY]


@dataclass(frozen=True)
class FilledTemplate:
    """A template with its values.

    ``script``: the whole batch script; ``options`` and ``settings``: those in force; ``arguments``: the options that
    were given, as words of sbatch's command line.
    """

    script: str
    options: Mapping[str, str]
    settings: Mapping[str, str]
    arguments: tuple[str, ...]


def parse(name: str, text: str) -> Template:
    """Parse a script. Raises UsageError where it is no template of this package."""
    if not text.startswith("#!"):
        raise UsageError(f"template {name}: its first line is no #! line, so it is no batch script")
    lines = text.split("\n")
    settings = [found for found in map(_SETTING.match, lines) if found]
    return Template(
        name=name,
        text=text,
        about=_about(lines),
        options=_options(lines),
        settings=tuple(TemplateSetting(m[1].lower(), m[3] if m[2] == "-" else None, m[4] or "") for m in settings),
        takes_command=any(_COMMAND in line for line in lines if not line.startswith("#")),
        takes_setup=any(map(_SETUP.match, lines)),
    )


def _about(lines: Sequence[str]) -> str:
    """Return the comment below the first line, up to its first empty line."""
    about = []
    for line in lines[1:]:
        if not line.startswith("# "):
            break
        about.append(line[2:])
    return "\n".join(about)


def _options(lines: Sequence[str]) -> dict[str, str]:
    options = {}
    for line in lines:
        found = _SBATCH.match(line)
        key = _key_of(found[1]) if found else ""
        if found and key:
            options[key] = _unquoted(found[2] or "") if not sbatch_options.BY_KEY[key].is_switch else "true"
    return options


def _key_of(flag: str) -> str:
    """Return the key of ``--gpus-per-node`` or ``-N``; "" for an option without one."""
    key = _SHORT.get(flag) or flag.lstrip("-").replace("-", "_")
    return key if key in sbatch_options.BY_KEY else ""


def _unquoted(value: str) -> str:
    try:
        words = shlex.split(value, comments=True)
    except ValueError:
        return value
    return words[0] if words else ""


def render(
    template: Template,
    values: Mapping[str, str],
    command: Sequence[str],
    path_entry: str = "",
    others: str = "",
    setup_lines: Sequence[str] = (),
    teardown_lines: Sequence[str] = (),
) -> FilledTemplate:
    """Return the job made from ``values`` (as the user wrote them) and ``command``. Raises UsageError.

    ``path_entry``: a directory to put in front of PATH; ``others``: keys that may be meant by an unknown one;
    ``setup_lines``: the user's shell code, which goes where a set-up file is read; ``teardown_lines``: code that
    launches and goes on, for a template that has a place for it.
    """
    given = _checked(template, values, others)
    _check_command(template, command)
    settings = {s.key: given.pop(s.key, s.default) for s in template.settings}
    missing = [key for key, value in settings.items() if value is None]
    if missing:
        raise UsageError(f"template {template.name} needs {missing[0]}=…: {_help(template, missing[0])}")
    setup = given.pop("setup", "")
    options = {key: value for key, value in {**template.options, **given}.items() if value != "false"}
    in_force = {key: str(value) for key, value in settings.items()}
    lines = _with_options(template.text.split("\n"), given)
    explicit = {key for key in in_force if key in values or key in map(normalised, values)}
    if teardown_lines and not any(map(_TEARDOWN.match, lines)):
        raise UsageError(f"template {template.name} has no line '# teardown: …', which is where those lines go")
    rewrite = _Rewriter(in_force, explicit, _set_up(setup, setup_lines, path_entry), command, teardown_lines)
    script = "\n".join(line for old in lines for line in rewrite(old))
    words = [sbatch_options.argument(sbatch_options.BY_KEY[key], value) for key, value in given.items()]
    return FilledTemplate(script, options, in_force, tuple(word for word in words if word))


def _set_up(file: str, lines: Sequence[str], path_entry: str) -> list[str]:
    """Return the lines that prepare the environment."""
    source = [f"source {shlex.quote(file)}"] if file else []
    return [*source, *lines, *([f'export PATH={shlex.quote(path_entry)}:"$PATH"'] if path_entry else [])]


def normalised(key: str) -> str:
    """Return ``--gpus-per-node`` and ``GPUS_PER_NODE`` as ``gpus_per_node``."""
    return key.strip().lstrip("-").replace("-", "_").lower()


def _checked(template: Template, values: Mapping[str, str], others: str) -> dict[str, str]:
    known = template.keys
    given: dict[str, str] = {}
    for written, value in values.items():
        key = normalised(written)
        if key not in known:
            raise UsageError(unknown_key(template, written, others))
        if key in given:
            raise UsageError(f"{key} is given twice")
        given[key] = _checked_value(key, value)
    return given


def _checked_value(key: str, value: str) -> str:
    check: Callable[[str], str]
    if key in sbatch_options.BY_KEY:
        check = sbatch_options.BY_KEY[key].check
    elif key == "setup":
        check = template_settings.path
    else:
        check = template_settings.BY_KEY[key].check if key in template_settings.BY_KEY else template_settings.anything
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise UsageError(f"{key}={value!r}: it is not valid UTF-8 text")
    try:
        return check(value)
    except UsageError as error:
        raise UsageError(f"{key}: {error}") from None


def unknown_key(template: Template, written: str, others: str = "") -> str:
    """Return a line that names the nearest right key."""
    key, known = normalised(written), template.keys
    where = f"template {template.name} has no key {written!r}"
    if others:
        return f"{where}: did you mean {others}?"
    near = [template_settings.OTHER_NAMES.get(key, "")]
    near = [name for name in near if name in known] or difflib.get_close_matches(key, known, 1, 0.5)
    if not near:
        return f"{where}: resilio submit --explain {template.name} lists them"
    return f"{where}: did you mean {near[0]}?"


def _check_command(template: Template, command: Sequence[str]) -> None:
    if template.takes_command and not command:
        raise UsageError(f"template {template.name} needs a command: … -- train.py --its-own arguments")
    if command and not template.takes_command:
        raise UsageError(
            f"template {template.name} takes no command, {command[0]!r} was given: no line of it has {_COMMAND}"
        )
    for word in command:
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise UsageError(f"argument {word!r} is not valid UTF-8")


def _help(template: Template, key: str) -> str:
    return next(setting.help for setting in template.settings if setting.key == key)


def _with_options(lines: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """Return each given option in place of its #SBATCH line, or below the last of them: sbatch takes the last."""
    new = {key: sbatch_options.sbatch_line(sbatch_options.BY_KEY[key], value) for key, value in given.items()}
    result, placed, last = [], set(), 1
    for line in lines:
        found = _SBATCH.match(line)
        key = _key_of(found[1]) if found else ""
        alone = found is not None and not re.search(r"\s--?\w", found[2] or "")
        if key in new and alone:
            if new[key] and key not in placed:
                result.append(new[key])
            placed.add(key)
        else:
            _refuse_to_undo(line, key, new)
            result.append(line)
        if line.startswith("#SBATCH"):
            last = len(result)
    more = [line for key, line in new.items() if line and key not in placed]
    return [*result[:last], *more, *result[last:]]


def _refuse_to_undo(line: str, key: str, new: Mapping[str, str]) -> None:
    """Refuse to switch off one of several options of one line: it cannot be removed."""
    undone = [name for name, text in new.items() if not text and sbatch_options.BY_KEY[name].flag in line.split()]
    if line.startswith("#SBATCH") and undone:
        raise UsageError(f"{undone[0]}=false: the template's line {line!r} holds several options: split it")


@dataclass(frozen=True)
class _Rewriter:
    """Writes settings, set-up and command into the lines of the script."""

    settings: Mapping[str, str]
    explicit: set[str]
    set_up: Sequence[str]
    command: Sequence[str]
    teardown: Sequence[str] = ()

    def __call__(self, line: str) -> list[str]:
        found = _SETTING.match(line)
        if found:
            key = found[1].lower()
            value = self.settings[key]
            literal = shlex.quote(value) if key in self.explicit else _default_literal(value)
            return [f"{found[1]}={literal}" + (f"  # {found[4]}" if found[4] else "")]
        if _SETUP.match(line) and self.set_up:
            return list(self.set_up)
        if _TEARDOWN.match(line) and self.teardown:
            return list(self.teardown)
        if not line.startswith("#") and _COMMAND in line:
            return [line.replace(_COMMAND, shlex.join(self.command))]
        return [line]


def _default_literal(value: str) -> str:
    """Return a default for the shell, which fills in Slurm's variables."""
    return f'"{value}"' if "$" in value else shlex.quote(value)
