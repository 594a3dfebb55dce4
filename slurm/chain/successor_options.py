"""The options of sbatch that make a job's successor like it, from ``scontrol show job``'s fields. Pure.

The batch script's own ``#SBATCH`` lines hold for the successor as well. Options from sbatch's command line, or from a
site's job-submit plug-in, are repeated here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# field of scontrol → option of sbatch, where the value needs no change
REPEATED = (
    ("JobName", "--job-name"),
    ("Partition", "--partition"),
    ("Account", "--account"),
    ("QOS", "--qos"),
    ("Reservation", "--reservation"),
    ("TimeLimit", "--time"),
    ("WorkDir", "--chdir"),
    ("Features", "--constraint"),
    ("ExcNodeList", "--exclude"),
    ("Comment", "--comment"),
)
EMPTY = ("", "(null)", "N/A")
HANDOVER_COMMENT = (
    "resilio: handed over"  # the launcher's own text in a job's Comment (launch/chain/orphaned_job.py): not repeated
)
_MEMORY_OPTIONS = ("--mem", "--mem-per-cpu", "--mem-per-gpu")


def handover_comment(part: str, reason: str) -> str:
    """Return the text for a job's Comment about the end of one of its runs, where no file could be written."""
    return f"{HANDOVER_COMMENT}, {part}: {reason}"


def successor_arguments(
    fields: Mapping[str, str],
    job: str,
    nodes: int,
    script: Path,
    text: str = "",
    words: Sequence[str] = (),
    is_file: Callable[[str], bool] = lambda path: Path(path).is_file(),
) -> list[str]:
    """Return sbatch's arguments for the next job.

    ``text``: the script's; ``words``: arguments known to this process, some of them the script's.
    """
    arguments = [f"--dependency=afterany:{job}", "--no-kill", f"--nodes={nodes}", "--export=ALL"]
    for field, option in REPEATED:
        value = fields.get(field, "")
        if value not in EMPTY and not value.startswith(HANDOVER_COMMENT):
            arguments.append(f"{option}={value}")
    arguments += shape(fields, nodes, text)
    arguments += generic_resources(fields.get("TresPerNode", ""), text)
    arguments += warning_signal(fields, text)
    for field, option in (("StdOut", "--output"), ("StdErr", "--error")):
        value = fields.get(field, "")
        if value not in EMPTY and (field == "StdOut" or value != fields.get("StdOut")):
            arguments.append(f"{option}={output_pattern(value, job)}")
    return [*arguments, "--open-mode=append", str(script), *script_arguments(fields, words, is_file)]


def output_pattern(path: str, job: str) -> str:
    """Return the path of a job's output with ``%j`` for its number, as far as the path shows that.

    The number is looked for in the file's name, from its end. A folder keeps its name: it exists, and its number may
    mean something else (``/data/run-22/out-%j`` of job 22).
    """
    folder, slash, name = path.rpartition("/")
    found = list(re.finditer(rf"(?<![0-9]){re.escape(job)}(?![0-9])", name))
    if found:
        name = f"{name[: found[-1].start()]}%j{name[found[-1].end() :]}"
    return f"{folder}{slash}{name}"


def shape(fields: Mapping[str, str], nodes: int, text: str) -> list[str]:
    """Return options for memory, CPUs, tasks, and exclusive nodes."""
    options = []
    for field, option in (("MinMemoryNode", "--mem"), ("MinMemoryCPU", "--mem-per-cpu")):
        value = fields.get(field, "0")
        others = [other for other in _MEMORY_OPTIONS if other != option and _asked(other, text)]
        if value not in (*EMPTY, "0") and not others:  # sbatch refuses two kinds, even when one is in the script
            options.append(f"{option}={value}")
    cpus, tasks = fields.get("CPUs/Task", "1"), fields.get("NumTasks", "")
    per_node = fields.get("NtasksPerN:B:S:C", "0").split(":")[0]
    if cpus.isdigit() and int(cpus) > 1:
        options.append(f"--cpus-per-task={cpus}")
    if per_node.isdigit() and int(per_node) > 0:
        options.append(f"--ntasks-per-node={per_node}")
    elif tasks.isdigit() and int(tasks) > nodes:
        options.append(f"--ntasks={tasks}")
    older = "NODE" if fields.get("OverSubscribe") == "NO" else "NO"
    exclusive = fields.get("Exclusive", older)  # 26.05 has this field, and says OverSubscribe=NO of every job
    if exclusive == "NODE":
        options.append("--exclusive")
    if fields.get("Requeue") == "0":
        options.append("--no-requeue")
    return options


def _asked(option: str, text: str) -> bool:
    return re.search(rf"^#SBATCH\s.*{option}[= ]", text, re.MULTILINE) is not None


def generic_resources(value: str, text: str) -> list[str]:
    """Return options that ask for a job's TresPerNode (``gres:gpu:4``) again.

    sbatch adds ``--gres`` to the script's ``#SBATCH --gpus-per-node``, so the same option must be used.
    """
    if value in EMPTY:
        return []
    entries = [entry.removeprefix("gres:").removeprefix("gres/") for entry in value.split(",")]
    options = []
    if re.search(r"^#SBATCH\s.*--gpus-per-node\b", text, re.MULTILINE):
        gpus = [entry for entry in entries if entry.split(":")[0] == "gpu"]
        entries = [entry for entry in entries if entry not in gpus]
        options = [f"--gpus-per-node={','.join(entry.partition(':')[2] or '1' for entry in gpus)}"] if gpus else []
    return [*options, *([f"--gres={','.join(entries)}"] if entries else [])]


def warning_signal(fields: Mapping[str, str], text: str) -> list[str]:
    """Return ``--signal``: no field of the job has it, only the line that submitted it."""
    options, _ = split_submit_line(fields.get("SubmitLine", ""), fields.get("Command", ""))
    given = re.findall(r"(?:^|\s)--signal[= ](\S+)", options)
    return [f"--signal={given[-1]}"] if given else []


def split_submit_line(line: str, command: str) -> tuple[str, str | None]:
    """Return ``sbatch OPTIONS SCRIPT ARGUMENTS`` as (options, arguments); arguments are None if unknown.

    ``command`` is the script's full path; the line names it as it was typed.
    """
    name = command.rpartition("/")[2]
    if line in EMPTY or not name or name in EMPTY:
        return ("" if line in EMPTY else line), None
    found = re.search(rf"\s(?:{re.escape(command)}|[^=\s]*{re.escape(name)})(?=\s|$)", line)
    if found is None:
        return line, None
    return line[: found.start()], line[found.end() :].strip()


def script_arguments(fields: Mapping[str, str], words: Sequence[str], is_file: Callable[[str], bool]) -> list[str]:
    """Return a batch script's own arguments: on 22.05 behind the script in ``Command``, later only in the submit line.

    Both join by spaces: an argument that holds spaces is put together again if it is among ``words``.
    """
    command = fields.get("Command", "")
    if command in EMPTY:
        return []
    script = script_path(command, is_file)
    text = command[len(script) :].strip()
    if not text:
        text = split_submit_line(fields.get("SubmitLine", ""), script)[1] or ""
    pieces = text.split(" ") if text else []
    known = sorted((word.split(" ") for word in words if " " in word), key=len, reverse=True)
    arguments = []
    while pieces:
        length = next((len(parts) for parts in known if pieces[: len(parts)] == parts), 1)
        arguments.append(" ".join(pieces[:length]))
        del pieces[:length]
    return arguments


def script_path(command: str, is_file: Callable[[str], bool]) -> str:
    """Return the script in a ``Command``: its longest beginning that is a file, else the first word."""
    pieces = command.split(" ")
    for length in range(len(pieces), 0, -1):
        path = " ".join(pieces[:length])
        if is_file(path):
            return path
    return pieces[0]


def arguments_unknown(fields: Mapping[str, str], text: str) -> bool:
    """Return whether the script reads arguments, and Slurm does not tell them (24.11 without accounting)."""
    reads = re.search(r"\$[@*1-9]|\$\{[@*1-9]", text) is not None
    command = fields.get("Command", "")
    return reads and command not in EMPTY and " " not in command and fields.get("SubmitLine", "") in EMPTY
