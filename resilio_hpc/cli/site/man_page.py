"""A manual page of a command, made from its parser: the macros of man(7). Pure."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import resilio_hpc
from resilio_hpc.cli.site import parsers

_WIDTH = 78
OWN_CHARACTERS = {"\\": "\\(rs", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti", '"': "\\(dq"}
_NO_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class ManPage:
    """``name``: of the file without ``.1``, as ``resilio-ckpt``; ``text``: what man reads."""

    name: str
    text: str


def pages(date: str) -> list[ManPage]:
    """Return the pages of ``resilio``, of each of its commands, and of ``resilio-launch``. ``date``: 2026-01-31."""
    whole = parsers.whole()
    commands = parsers.commands_of(whole)
    names = [whole.prog, *(_page_name(name) for name, _, _ in commands)]
    first = _first_page(whole, [(name, summary) for name, summary, _ in commands], date)
    others = [page_of(_page_name(name), summary, below, names, date) for name, summary, below in commands]
    return [first, *others]


def _page_name(command: str) -> str:
    return f"resilio-{command}"


def _first_page(parser: argparse.ArgumentParser, commands: Sequence[tuple[str, str]], date: str) -> ManPage:
    lines = [*_head(parser.prog, str(parser.description), date), ".SH SYNOPSIS", ".B resilio", ".I COMMAND"]
    lines += [".RI [ ARGUMENT \\ ...]", ".SH COMMANDS"]
    for name, summary in commands:
        lines += [".TP", f".BR {escaped(_page_name(name))} (1)", *_filled(summary)]
    return ManPage(parser.prog, _joined(lines))


def page_of(name: str, summary: str, parser: argparse.ArgumentParser, names: Sequence[str], date: str) -> ManPage:
    """Return the page of a command. ``names``: of all pages, which it names at its end."""
    lines = [*_head(name, summary, date), *_body(parser, ".SH"), *_epilog(parser.epilog or "")]
    for verb, about, below in parsers.commands_of(parser):
        lines += [f".SH {_quoted(f'{parser.prog} {verb}'.upper())}", *_filled(about), *_body(below, ".SS")]
        if below.epilog != parser.epilog:
            lines += _epilog(below.epilog or "", ".SS")
    others = [f".BR {escaped(one)} (1)," for one in names if one != name]
    return ManPage(name, _joined([*lines, ".SH SEE ALSO", *others[:-1], others[-1].rstrip(",")]))


def _head(name: str, summary: str, date: str) -> list[str]:
    title = f'.TH {_quoted(name.upper())} 1 {date} "resilio {resilio_hpc.__version__}" "Resilio"'
    return [title, ".SH NAME", f"{escaped(name)} \\- {escaped(summary)}"]


def _body(parser: argparse.ArgumentParser, heading: str) -> Iterator[str]:
    vars(parser)["color"] = False  # from Python 3.14 on, usage and help may be coloured
    yield from (f"{heading} SYNOPSIS", ".nf", *_synopsis(parser), ".fi")
    if heading == ".SH" and parser.description:
        yield from (".SH DESCRIPTION", *_filled(parser.description))
    for group in parser._action_groups:
        shown = [one for one in group._group_actions if one.help is not argparse.SUPPRESS]
        shown = [one for one in shown if not isinstance(one, argparse._SubParsersAction)]
        if shown:
            yield f"{heading} {_quoted(str(group.title).upper())}"
        for action in shown:
            yield from (".TP", _invocation(action), *_filled(_help_of(parser, action)))


def _synopsis(parser: argparse.ArgumentParser) -> list[str]:
    usage = parser.format_usage().removeprefix("usage: ").rstrip("\n")
    return [_line(one) for one in textwrap.dedent(f"       {usage}").splitlines()]


def _invocation(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else _value_of(action)
    names = ", ".join(f"\\fB{escaped(name)}\\fR" for name in parsers.spellings(action))
    return " ".join(part for part in (names, f"\\fI{escaped(value)}\\fR" if value else "") if part)


def _value_of(action: argparse.Action) -> str:
    """Return the word that stands for an option's value, or the values that it may have."""
    if action.metavar is not None:
        return action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper() if action.option_strings else action.dest


def _help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the help with the values that it names: ``%(default)s`` and its like."""
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _epilog(text: str, heading: str = ".SH") -> Iterator[str]:
    """Give the text behind the options: a line that begins with words and a colon begins a part of its own."""
    for part in re.split(r"\n(?=\w[\w ,]*:)", f"\n{text.strip()}")[1:]:
        title, _, rest = part.partition(":")
        yield f"{heading} {_quoted(title.upper())}"
        inline, _, block = rest.partition("\n")
        yield from _filled(inline)
        if block.strip():
            yield from (".nf", *(_line(line) for line in textwrap.dedent(block).rstrip().splitlines()), ".fi")


def _filled(text: str) -> list[str]:
    """Return running text in short lines."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    wrapped = [textwrap.wrap(" ".join(one.split()), _WIDTH, break_on_hyphens=False) for one in paragraphs]
    return [line if line == ".PP" else _line(line) for one in wrapped for line in (".PP", *one)][1:]


def _line(text: str) -> str:
    """Return a line of text, which is no request of roff, whatever it begins with."""
    return f"\\&{escaped(text)}" if text[:1] in (".", "'") or not text.strip() else escaped(text)


def escaped(text: str) -> str:
    """Return text as roff reads it: only ASCII, each character as it is."""
    plain = _NO_CHARACTER.sub("", text)
    return "".join(OWN_CHARACTERS.get(one, one if one.isascii() else f"\\[u{ord(one):04X}]") for one in plain)


def _quoted(text: str) -> str:
    return f'"{escaped(text)}"'


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
