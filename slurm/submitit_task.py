"""One rank of a job of ResilioExecutor: ``resilio-launch … -m resilio_hpc.slurm.submitit_task FOLDER``.

submitit's own code loads the function, runs it and stores its result; here only what another life of this rank may
have left is put out of its way first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import submitit
from submitit.core import utils
from submitit.core.submission import process_job


def forget_earlier_life(paths: utils.JobPaths) -> None:
    """Remove the half-written file of a rank that was killed while it stored its result.

    submitit does not overwrite it. A rank that was restarted, since another failed, leaves a result that no longer
    counts.
    """
    for path in (paths.result_pickle, Path(f"{paths.result_pickle}.save_tmp")):
        path.unlink(missing_ok=True)


def main(folder: str) -> None:
    """Run the function; raise what it raises."""
    os.environ["SUBMITIT_FOLDER"] = folder
    forget_earlier_life(submitit.JobEnvironment().paths)
    process_job(folder)


if __name__ == "__main__":
    main(sys.argv[1])
