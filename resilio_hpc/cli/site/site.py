"""``resilio site completion | install``: what a site installs beside the commands, made from these."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.cli.site import completion, man_page, module_file
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

_EXAMPLES = """examples:
  eval "$(resilio site completion bash)"        in ~/.bashrc; zsh: the same in ~/.zshrc
  resilio site completion fish | source         in ~/.config/fish/config.fish
  resilio site install                          for all users of this installation: below its own prefix
  resilio site install ~/.local                 for yourself

exit codes: 0 written; 1 a file could not be written; 2 a mistake in the command, or shtab is not installed
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see the help."""
    parser = Parser(
        prog="resilio site",
        description="Completion for shells, manual pages and a module file, made from the commands of this version.",
        epilog=_EXAMPLES,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="completion | install")
    shell = verbs.add_parser("completion", help="print what a shell needs to complete resilio and resilio-launch")
    shell.add_argument("shell", choices=completion.SHELLS, help="which shell")
    install = verbs.add_parser(
        "install", help="write completion and manual pages below PREFIX/share, and a module file for PREFIX/bin"
    )
    install.add_argument(
        "prefix", nargs="?", type=Path, default=Path(sys.prefix), metavar="PREFIX",
        help="where commands are in PREFIX/bin (default: that of this installation)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if options.verb == "completion":
        print("\n".join(completion.scripts(options.shell).values()), flush=True)
        return 0
    return _install(options)


def _install(options: argparse.Namespace) -> int:
    prefix = options.prefix.expanduser().absolute()
    if not prefix.is_dir():
        raise UsageError(f"{printable(str(prefix), 500)} is no directory: name one that is there")
    found = files(prefix, os.environ)
    for name, text in found.items():
        path = prefix / "share" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode(), durable=False)
    print(f"{len(found)} files are in {printable(str(prefix / 'share'), 500)}", flush=True)
    return 0


def files(prefix: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return each file below ``prefix``/share, by its path there. Raises UsageError."""
    seconds = int(environment.get("SOURCE_DATE_EPOCH") or time.time())
    pages = man_page.pages(time.strftime("%Y-%m-%d", time.gmtime(seconds)))
    found = {f"man/man1/{page.name}.1": page.text for page in pages}
    for shell, place in completion.PLACES.items():
        found |= {place.format(name): text for name, text in completion.scripts(shell).items()}
    if (prefix / "bin" / "resilio").exists():
        found[module_file.PLACE] = module_file.text(prefix)
    return found
