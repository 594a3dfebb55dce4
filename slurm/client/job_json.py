"""Jobs from JSON: ``squeue --json`` of 22.05, ``scontrol show jobs --json`` from 23.02 on. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.client.answers import AnswerDecoder
from resilio_hpc.slurm.client.hostlist import expand
from resilio_hpc.slurm.client.json_values import limit, moment, text, texts, whole
from resilio_hpc.slurm.client.model import Job
from resilio_hpc.slurm.client.states import job_state


class JobRecord(msgspec.Struct):
    """The fields that are used, of whatever type."""

    job_id: Any = None
    array_job_id: Any = None
    array_task_id: Any = None
    time_limit: Any = None
    job_state: Any = None
    array_task_string: Any = None
    state_reason: Any = None
    state_description: Any = None
    user_name: Any = None
    user_id: Any = None
    account: Any = None
    qos: Any = None
    partition: Any = None
    node_count: Any = None
    nodes: Any = None
    submit_time: Any = None
    start_time: Any = None
    end_time: Any = None
    restart_cnt: Any = None
    dependency: Any = None
    name: Any = None
    comment: Any = None
    command: Any = None
    current_working_directory: Any = None


_DECODER = AnswerDecoder("jobs", JobRecord)


def parse_jobs(output: str) -> tuple[Job, ...]:
    """Return all jobs of an answer. Raises Garbled and Unanswered; an odd field of a job counts as not told."""
    return tuple(job for record in _DECODER.records(output) if (job := _job(record)) is not None)


def _job(record: JobRecord) -> Job | None:
    number = whole(record.job_id)
    if not number:
        return None
    array = whole(record.array_job_id) or None
    task = whole(record.array_task_id)
    minutes = limit(record.time_limit)
    return Job(
        id=number,
        state=job_state(texts(record.job_state)),
        array_job_id=array,
        array_tasks="" if array is None else str(task) if task is not None else text(record.array_task_string),
        reason=text(record.state_description) or text(record.state_reason),  # as squeue's table has it
        user=text(record.user_name),
        user_id=whole(record.user_id),
        account=text(record.account),
        qos=text(record.qos),
        partition=text(record.partition),
        node_count=whole(record.node_count),
        nodes=host_names(text(record.nodes)),
        time_limit_s=None if minutes is None else minutes * 60,
        submit_time=moment(record.submit_time),
        start_time=moment(record.start_time),
        end_time=moment(record.end_time),
        restarts=whole(record.restart_cnt),
        dependency=text(record.dependency),
        name=text(record.name),
        comment=text(record.comment),
        command=text(record.command),
        work_dir=text(record.current_working_directory),
    )


def host_names(hosts: str) -> tuple[str, ...]:
    """Return a host list's names; none where it is no host list. Pure."""
    try:
        return tuple(expand(hosts))
    except UsageError:
        return ()
