"""Words that name software, precision, and network: as options they must be known ones, in tables no misspelt ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

FRAMEWORKS = (
    "Megatron-Core", "Megatron-LM", "Megatron-LM 2021", "Megatron-DeepSpeed", "NeMo", "NeMo-Megatron", "torchtitan",
    "torchtitan+compile", "torchtitan+compile+loss", "DeepSpeed", "DeepSpeed ZeRO-3", "FSDP", "PyTorch", "llm-foundry",
    "HAI-LLM", "Meta-Llama-3", "any",
)  # fmt: skip
# other names of the same, and parts that may follow
# "Megatron-LM" in a table is a release before Megatron-Core; who plans a job has today's, whose core that is
_FRAMEWORK_ALIASES = {"megatron": "Megatron-Core", "mcore": "Megatron-Core", "megatron-lm": "Megatron-Core",
                      "fsdp2": "FSDP", "torch": "PyTorch", "foundry": "llm-foundry"}  # fmt: skip
_RELEASE = re.compile(r"\d\d\.\d\d(\.\d+)? nemo container", re.IGNORECASE)  # its kernels differ by release
_ASYNC = re.compile(r"\+async-?tp\Z", re.IGNORECASE)
PRECISIONS = ("bf16", "fp16", "fp32", "fp8", "fp8 rowwise", "mxfp8", "nvfp4", "fp4")
_PRECISION_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float8": "fp8"}
INTERCONNECTS = ("8x400Gb/s", "400Gb/s per GPU", "1600Gb/s per node")  # examples of the three forms
_RATE = re.compile(r"\d+\s*x\s*(?:\w+ )?\d+\s*Gb/s|\d+\s*Gb/s[^;,]*per (?:GPU|node)", re.IGNORECASE)
_ADAPTERS = re.compile(r"(\d+)\s*[x*]\s*(?:\w+ )?(\d+)", re.IGNORECASE)
_PER = re.compile(r"(\d+)[^;,\d]*per (gpu|node)", re.IGNORECASE)
_CLOSE = 0.5  # how alike two words are, from 0 to 1


def known_framework(text: str) -> str:
    """Return the framework's name as it is known here. Raises UsageError with the nearest name."""
    if _RELEASE.fullmatch(text.strip()):
        return text.strip()
    part = _ASYNC.search(text)
    name = _known("--framework", text[: part.start()] if part else text, FRAMEWORKS, _FRAMEWORK_ALIASES)
    return f"{name}+AsyncTP" if part else name


def known_precision(text: str) -> str:
    """Return the precision's name as it is known here. Raises UsageError with the nearest name."""
    return _known("--precision", text, PRECISIONS, _PRECISION_ALIASES)


def known_interconnect(text: str) -> str:
    """Return a network's rate, if it is written so that it is understood; "" stays. Raises UsageError."""
    # GB/s are bytes: eight times as much
    if not text or (_RATE.search(text) and "GB/s" not in text):
        return text
    adapters, per = _ADAPTERS.search(text), _PER.search(text)
    near = ""
    if adapters:
        bits = 8 if "GB/s" in text else 1
        near = f"{adapters[1]}x{int(adapters[2]) * bits}Gb/s"
    elif per:
        near = f"{per[1]}Gb/s per {'GPU' if per[2].lower() == 'gpu' else 'node'}"
    hint = f"did you mean {near}? " if near else ""
    raise UsageError(
        f"--interconnect {printable(repr(text), 60)} names no rate: {hint}it is written {', '.join(INTERCONNECTS[:2])} "
        f"or {INTERCONNECTS[2]}"
    )


def misspelt(cell: str, known: Collection[str], alike: float) -> str:
    """Return the known word that a table's cell probably means but misspells; "" for any other text.

    Tables are of others: their cells say more than a name, and may name software that is not known here.
    """
    words = {word.lower() for name in known for word in re.split(r"[\s+]", name)}
    plain = cell.lower()
    if any(word in plain for word in words if len(word) > 2):
        return ""
    for word in re.split(r"[\s+/(),;]+", plain):
        near = difflib.get_close_matches(word, words, 1, alike)
        if near and len(word) > 2:
            return min((name for name in known if near[0] in name.lower()), key=len)
    return ""


def misspelt_framework(cell: str) -> str:
    """Return the framework that a cell probably means but misspells; "" for any other text."""
    return misspelt(cell, (*FRAMEWORKS, *_FRAMEWORK_ALIASES, "Megatron"), 0.8)


def misspelt_precision(cell: str) -> str:
    """Return the precision that a cell probably means but misspells; "" for any other text."""
    return misspelt(cell, (*PRECISIONS, *_PRECISION_ALIASES), 0.75)  # short words


def _plain(text: str) -> str:
    return re.sub(r"[\s_.-]", "", text.lower())


def _known(flag: str, text: str, known: Collection[str], aliases: Mapping[str, str]) -> str:
    names = {_plain(name): name for name in known} | {_plain(alias): name for alias, name in aliases.items()}
    if (found := names.get(_plain(text))) is not None:
        return found
    near = difflib.get_close_matches(_plain(text), names, 1, _CLOSE)
    hint = f"did you mean {names[near[0]]}? " if near else ""
    raise UsageError(f"{flag} {printable(repr(text), 60)} is not known: {hint}known are {', '.join(known)}")
