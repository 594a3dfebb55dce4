"""Where notifications go: commands, webhooks, and services that Apprise knows; all may hold secrets.

So a target is never part of the launcher's own command lines, of the ledger, or of an error; ``Target.name`` stands for
it there. The launcher keeps the targets in the run directory (``notify``, 0600), where agents read them.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

FILE = "notify"  # in the run directory
MAX_FILE_BYTES = 64 * 1024
FLAG = "--notify"


@dataclass(frozen=True)
class Target:
    """A target. ``text``: as the user gave it, a secret; ``name``: without the secret."""

    kind: str  # command, webhook, apprise
    text: str
    name: str

    @property
    def argv(self) -> list[str]:
        """Return the words of the command."""
        return shlex.split(self.text)


def parse_target(text: str) -> Target:
    """Return the target: one command or URL. Raises UsageError, which does not show it. Pure."""
    text = text.strip()
    if not text:
        raise UsageError(f"{FLAG} is empty: is the shell variable that should hold it set?")
    if not text.isprintable():
        raise UsageError(f"{FLAG}: the target holds a character that cannot be printed; write it on one line")
    scheme = text.partition("://")[0]
    if "://" in text and scheme.isalnum():
        return _webhook(text, scheme.lower())
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{FLAG}: a command of which the quotes do not match ({error})") from None
    if not words:
        raise UsageError(f"{FLAG}: a command without a word")
    return Target("command", text, f"command {Path(words[0]).name}")


def _webhook(text: str, scheme: str) -> Target:
    if scheme not in ("http", "https"):  # a host may be a token there, so no part of it is shown
        return Target("apprise", text, f"apprise {printable(scheme, 20)}")
    try:
        parts = urllib.parse.urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise UsageError(f"{FLAG}: a URL that cannot be read; is its host in order?") from None
    if not host or " " in text or not text.isascii():
        raise UsageError(f"{FLAG}: a URL without a host, with a space, or with letters that a URL cannot have")
    if parts.username is not None:
        raise UsageError(f"{FLAG}: user:password@ in a URL is not supported; use a token in its path, or a command")
    return Target("webhook", text, f"webhook {scheme}://{host}{f':{port}' if port else ''}")


def read_targets(given: Sequence[str], cwd: Path) -> tuple[Target, ...]:
    """Return the targets of a command line, with those in ``@FILE`` (one per line, ``#`` begins a comment line)."""
    targets: dict[str, Target] = {}
    for text in given:
        lines = _lines(text[1:], cwd) if text.startswith("@") else [text]
        for line in lines:
            target = parse_target(line)
            targets[target.text] = target
    return tuple(targets.values())


def _lines(name: str, cwd: Path) -> list[str]:
    path = cwd / Path(name).expanduser()
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise UsageError(f"{FLAG} @{name}: the file is too big for a list of targets")
        lines = [line.strip() for line in content.decode().splitlines()]
    except OSError as error:
        raise UsageError(f"{FLAG} @{name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{FLAG} @{name}: the file is not UTF-8") from None
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise UsageError(f"{FLAG} @{name}: no target in this file; write one command or URL per line")
    return lines


def check_targets(targets: Sequence[Target], cwd: Path) -> None:
    """Raise UsageError for a command that this machine, which will run it, does not have, and for a wrong service."""
    for target in targets:
        if target.kind == "apprise":
            _check_service(target)
        word = target.argv[0] if target.kind == "command" else ""
        if word and shutil.which(str(cwd / word) if "/" in word else word) is None:
            raise UsageError(f"{FLAG}: {word!r} was not found or is not executable")


def _check_service(target: Target) -> None:
    """Raise UsageError where Apprise is missing, or cannot read the URL."""
    scheme = target.text.partition("://")[0].lower()
    if importlib.util.find_spec("apprise") is None:
        raise UsageError(
            f"{FLAG}: {scheme}:// needs Apprise (pip install 'resilio_hpc[notify]'); https:// and commands do not"
        )
    import apprise  # half a second, and only where it is used

    service = apprise.Apprise.instantiate(target.text, suppress_exceptions=True)
    if service is None:
        raise UsageError(f"{FLAG}: {scheme}:// is not supported, or its URL is not as Apprise wants it")


def put_away(run_path: Path, targets: Sequence[Target]) -> None:
    """Write the targets for the agents; this launch's replace those of an earlier one. Raises UsageError."""
    file = run_path / FILE
    try:
        if targets:
            write_atomic(file, json.dumps([target.text for target in targets]).encode(), 0o600)
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}; choose another with --run-dir") from None


def kept(run_path: Path) -> tuple[Target, ...]:
    """Return the targets that ``put_away`` wrote; none if there are none, or they are damaged. Raises Untrusted."""
    try:
        return parsed(json.loads(trusted_files.read(run_path / FILE)))
    except (OSError, ValueError):
        return ()


def parsed(texts: Sequence[str]) -> tuple[Target, ...]:
    """Return the targets of these texts; none where one is damaged. Pure."""
    try:
        return tuple(parse_target(text) for text in texts)
    except (ValueError, TypeError, AttributeError, UsageError):
        return ()


def masked(argv: Sequence[str]) -> list[str]:
    """Return a command line without secrets: what follows ``--notify``, except ``@FILE``, is masked. Pure."""
    shown, secret = [], False
    for word in argv:
        flag, equals, value = word.partition("=")
        if secret:
            shown.append(_mask(word))
        elif equals and _is_flag(flag):
            shown.append(f"{flag}={_mask(value)}")
        else:
            shown.append(word)
        secret = not secret and not equals and _is_flag(flag)
    return shown


def _is_flag(word: str) -> bool:
    return len(word) > 4 and FLAG.startswith(word)  # --noti is understood too


def _mask(text: str) -> str:
    if text.startswith("@"):
        return text
    try:
        return f"<{parse_target(text).name}>"
    except UsageError:
        return "<not shown>"
