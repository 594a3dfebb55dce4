"""What single lines of the programs around a job mean: one of our own writing for each kind of text."""

from __future__ import annotations

import pytest

from resilio_hpc.diagnose.causes.log_line import stated
from resilio_hpc.diagnose.causes.pattern_table import LineRole, find

TEXTS = """
slurm.unkillable | slurmstepd: error: *** STEP 7.0 STEPD TERMINATED ON n1 AT x DUE TO JOB NOT ENDING WITH SIGNALS ***
slurm.address | srun: error: fwd_tree_thread: can't find address for host n3, check slurm.conf
slurm.address | sbatch: fatal: Could not establish a configuration source
slurm.gres | srun: error: Task launch for StepId=7.1 failed on node n1: Unable to layout tasks on given cpus
slurm.gres | sbatch: error: Invalid --distribution specification
slurm.prolog | salloc: Prolog failure on node n2
slurm.oom | JobState: OUT_OF_MEMORY (exit code 0)
slurm.memory-limit | TERM_MEMLIMIT: job killed after reaching LSF memory usage limit
slurm.time-limit | =>> PBS: job killed: walltime 3605 exceeded limit 3600
by-writer.slurm | slurmctld: error: this text is not in the table
by-writer.slurm | [12.extern] error: this text is not in the table
host.oom-killer | earlyoom: sending SIGKILL, killing process 12 uid 1000
host.shm-full | RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible
host.too-many-files | unable to open shared memory object </torch_7_1> in read-write mode: Too many open files (24)
host.cannot-allocate | pyarrow.lib.ArrowMemoryError: malloc of size 64 failed
host.no-processes | bash: fork: Cannot fork
gpu.full | E0000 client.cc:1] Execution failed: Resource exhausted: Out of memory while trying to allocate 7
gpu.full | RuntimeError: HPU out of memory.
gpu.out-of-memory | RuntimeError: CUDA driver error: out of memory
gpu.xid-hardware | NVRM: Xid (PCI:0000:4b:00): 149, NETIR Fatal XC0 i0 Link 03
gpu.xid-unclear | NVRM: Xid (PCI:0000:4b:00): 109, pid=7, name=python3, Ch 00000008, errorString CTX SWITCH TIMEOUT
gpu.xid-recovery | NVRM: Xid (PCI:0000:4b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1
gpu.xid-named | XidCriticalError: Xid=79 on Device=GPU-1, the device will go unhealthy
gpu.ecc | Remapping Failure Occurred : Yes
gpu.nvlink | nvidia: NVLink 3 training has failed
gpu.gone | NVRM: GPU 0000:4b:00.0: RmInitAdapter failed! (0x23:0x65:1426)
gpu.mce | EDAC MC1: 1 UE memory read error on CPU_SrcID#0_MC#1_Chan#0_DIMM#0
by-writer.gpu | NVRM: nvTextOfOurOwn: request timed out
stack.gpu-library-version | Loaded runtime CuDNN library: 8.0.5 but source was compiled with: 8.1.0.
stack.gpu-library-version | RuntimeError: HIP error: invalid device function
stack.no-gpu | RuntimeError: No CUDA GPUs are available
stack.kernel-image | triton.OutOfResources: out of resource: shared memory, Required: 7, Hardware limit: 5
stack.symbol | /usr/bin/ld: cannot find -lcuda: No such file or directory
stack.symbol | ImportError: libgomp.so.1: cannot allocate memory in static TLS block
stack.module | bash: line 1: torchrun: command not found
stack.memlock | ib_md.c:7 UCX ERROR ibv_reg_mr(address=0x7, length=64) failed: Cannot allocate memory
stack.pmi | srun: error: Couldn't find the specified plugin name for mpi/pmix looking at all files
stack.compiler | /tmp/x/main.c:2:10: fatal error: cuda.h: No such file or directory
stack.cpu-arch | slurmstepd: error: pyxis:     mkdir: cannot create directory '/run/enroot': Permission denied
stack.cpu-arch | FATAL:   container creation failed: mount /x->/y error
stack.container-start | slurmstepd: error: pyxis: container start failed with error code: 1
slurm.cancelled | slurmstepd: error: pyxis: child 7 failed with error code: 1
stack.illegal-instruction | traps: a.out[7] trap invalid opcode ip:7 sp:7 error:0 in a.out[7]
by-writer.mpi | mpiexec@n1] our_own_text (a.c:7): error in a text that is not in the table
by-writer.check | F0000 7 a.cc:7] Check failed: a == b (1 vs. 2)
net.ib-setup | n1.7PSM2 can't open hfi unit: -1 (err=23)
net.ib-setup | infiniband efa_0: Failed to process command ALLOC_QP (opcode 1) comp_status 1 err -12
net.efa | n1:7:7 [0] a:7 NCCL WARN NET/OFI Couldn't open AV. RC: -22
net.ucx | a.c:7  UCX  WARN  failed to reach 7: Input/output error
net.no-interface | A process or daemon was unable to complete a TCP connection
net.no-interface | OSError: [Errno 113] No route to host
net.daemons | ORTE was unable to reliably start one or more daemons.
by-writer.net | n1:7:7 [0] a.cc:7 NCCL WARN NET/Own : this text is not in the table
disk.damaged | OSError: [Errno 117] Structure needs cleaning: '/scratch/a'
disk.full | File.lua:7: write error: wrote 7 blocks instead of 9 at THDiskFile.c:7
disk.full | slurmstepd: error: pyxis:     Write failed because No space left on device
disk.endpoint | LNetError: 7:0:(o2iblnd_cb.c:7) Timed out tx
disk.locks | File locking failed in ADIOI_GEN_SetLock(fd 7,cmd F_SETLKW/7)
disk.torn-checkpoint | _pickle.UnpicklingError: invalid load key, 'v'.
disk.hdf5 | #000: H5D.c line 7 in H5Dread(): cannot read
disk.writer-echo | RuntimeError: [enforce fail at inline_container.cc:7] . unexpected pos 64 vs 0
data.table | OSError: Corrupt snappy compressed data.
data.sample | decord._ffi.base.DECORDError: cannot find video stream
launch.environment | KeyError: 'LOCAL_RANK'
launch.environment | omegaconf.errors.MissingMandatoryValue: Missing mandatory value: model
launch.device-ordinal | (GTL DEBUG: 1) cuIpcOpenMemHandle: invalid argument
code.process-group | ValueError: Default process group has not been initialized, please call it.
code.shapes | ValueError: cannot reshape array of size 7 into shape (2,3)
echo.elastic | [2026-11-28 10:00:00,1] [INFO] [launch.py:7:sigkill_handler] Killing subprocess 7
echo.peer-gone | E0000 7 agent.cc:7] Polled an error from coordination service (this can be from another task).
echo.mpi | *** An error occurred in MPI_Init
hang.collective | DEADLINE_EXCEEDED: Barrier timed out. Id: x
run.node-dead | RuntimeError: task 7 failed because the node it was running on is dead or unavailable
slurm.plugin-start | slurmstepd: error: execve(): /var/spool/slurmd/job00007/slurm_script: No such file or directory
slurm.service | slurmd: error: slurmd initialization failed
slurm.credential | Job for munge.service failed because the control process exited with error code.
slurm.gres | slurmstepd: error: execve(): /usr/bin/ls: No such file or directory
stack.service | Job for nvidia-fabricmanager.service failed because the control process exited with error code.
net.none | n1:7:7 [0] a.cc:7 NCCL WARN NET/IB : No device found
by-writer.nccl | n1:7:7 [0] a.cc:7 NCCL WARN Cuda failure 9 'of our own'
disk.write-failed | InternalError (see above): Error writing (tmp) checkpoint file: /a/model
hang.collective | RuntimeError: DataLoader timed out after 7 seconds
stack.mpi-shm | [n1:7] shmem: mmap: an error occurred while determining whether /tmp/sm_segment.n1.7 could be created
disk.locks | #004: H5FDsec2.c line 7 in H5FD_sec2_lock(): file locking disabled on this file system, errno = 38
code.exception-inside | 2026-11-28 rank 3 gave up with ValueError: of our own
signal.kill | /var/spool/slurmd/job7/slurm_script: line 9:  7 Killed                  python train.py
signal.segv | double free or corruption (!prev)
"""
OF_NO_MEANING = [
    "Remapping Failure Occurred : No",
    "pyxis: importing docker image ...",
    "slurmstepd: error: pyxis:     [INFO] Found all layers in cache",
    "mlx5_0 is used",
    "Using cached xid 7 of 79",
]


@pytest.mark.parametrize("text", [text for text in TEXTS.splitlines() if text])
def test_a_line_is_known(text: str) -> None:
    name, _, line = text.partition(" | ")
    pattern = find(stated(line))
    assert pattern is not None
    assert pattern.name == name


@pytest.mark.parametrize("line", OF_NO_MEANING)
def test_a_line_that_only_informs_is_not_taken_for_a_failure(line: str) -> None:
    pattern = find(stated(line))
    assert pattern is None or pattern.role is LineRole.ECHO


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("ERROR 11-28 10:00:00 worker_base.py:145] TypeError: x", "code.exception"),
        ("[2026-11-28 10:00:00,123] [ERROR] [engine.py:7:step] KeyError: 'x'", "code.exception"),
        ("CUDA unknown error - this may be due to an environment that was set up wrongly", "gpu.unknown-error"),
    ],
)
def test_prefixes_of_loggers_and_suppositions_behind_a_dash_hide_no_statement(line: str, name: str) -> None:
    pattern = find(stated(line))
    assert pattern is not None
    assert pattern.name == name
