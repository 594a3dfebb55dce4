"""A Jacobi solver on a square plate with mpi4py and numpy, which survives what breaks (no torch anywhere).

The plate's edges are held at 0, its upper one at 1; the solver finds the temperatures in between. Each rank owns a
block of the grid with a halo of one cell; a step exchanges halos, averages neighbours and reduces the largest change.

    sbatch sbatch_templates/mpi.sbatch examples/mpi_jacobi.py --size 512 --steps 2000

The result does not depend on the number of ranks, on their places, or on how often they were restarted: not in one bit.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer

Block = np.ndarray[tuple[int, int], np.dtype[np.float64]]


class Plate:
    """This rank's block of a ``size`` x ``size`` grid, with the halo around it."""

    def __init__(self, world: MPI.Intracomm, size: int) -> None:
        self.cart = world.Create_cart(MPI.Compute_dims(world.size, 2), reorder=False)  # ranks keep their checkpoints
        self.size = size
        row, column = self.cart.Get_coords(self.cart.rank)
        rows, columns = self.cart.dims
        self.rows = range(size * row // rows, size * (row + 1) // rows)
        self.columns = range(size * column // columns, size * (column + 1) // columns)
        self.cells: Block = np.zeros((len(self.rows) + 2, len(self.columns) + 2))
        if row == 0:
            self.cells[0, :] = 1.0
        self.up, self.down = self.cart.Shift(0, 1)
        self.left, self.right = self.cart.Shift(1, 1)

    def exchange_halos(self) -> None:
        """Neighbours' edges become our halo; at the plate's own edge there is no neighbour, and the halo stays."""
        for source, target, send, receive in (
            (self.down, self.up, np.s_[1, 1:-1], np.s_[-1, 1:-1]),
            (self.up, self.down, np.s_[-2, 1:-1], np.s_[0, 1:-1]),
            (self.right, self.left, np.s_[1:-1, 1], np.s_[1:-1, -1]),
            (self.left, self.right, np.s_[1:-1, -2], np.s_[1:-1, 0]),
        ):
            buffer = self.cells[receive].copy()
            self.cart.Sendrecv(self.cells[send].copy(), target, recvbuf=buffer, source=source)
            self.cells[receive] = buffer

    def step(self) -> float:
        """One Jacobi step of the whole plate. Returns the largest change of a cell."""
        self.exchange_halos()
        old = self.cells
        inner = 0.25 * ((old[:-2, 1:-1] + old[2:, 1:-1]) + (old[1:-1, :-2] + old[1:-1, 2:]))
        change = np.array(np.abs(inner - old[1:-1, 1:-1]).max(initial=0.0))
        self.cells[1:-1, 1:-1] = inner
        largest = np.zeros(())
        self.cart.Allreduce(change, largest, op=MPI.MAX)
        return float(largest)

    def gather(self) -> Block | None:
        """Return the whole plate, on rank 0."""
        blocks = self.cart.gather((self.rows.start, self.columns.start, self.cells[1:-1, 1:-1]), root=0)
        if blocks is None:
            return None
        plate = np.zeros((self.size, self.size))
        for row, column, block in blocks:
            plate[row : row + block.shape[0], column : column + block.shape[1]] = block
        return plate


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=256, help="rows and columns of the plate")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=20, help="save every so many steps")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="shortest duration of a step, to rehearse with")
    parser.add_argument("--result", type=Path, help="rank 0 writes the digest of the plate to this file")
    parser.add_argument("--abort-at", type=int, default=-1, help="rank 1 calls MPI_Abort there, in its first life")
    parser.add_argument("--raise-at", type=int, default=-1, help="rank 1 raises an exception there, in its first life")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    run, checkpoint = train.attach(), Checkpointer()
    plate = Plate(MPI.COMM_WORLD, args.size)
    state = {"cells": plate.cells, "change": 0.0}
    restored = checkpoint.restore(state)
    start = restored[0] if restored else 0
    planted = run.round == 0 and run.rank == 1
    for step in run.steps(start, args.steps, save=checkpoint.saver(state), every=args.every):
        began = time.monotonic()
        if planted and step == args.abort_at:
            MPI.COMM_WORLD.Abort(5)
        if planted and step == args.raise_at:
            raise RuntimeError(f"planted in step {step}")
        state["change"] = plate.step()
        time.sleep(max(0.0, began + args.step_seconds - time.monotonic()))
    whole = plate.gather()
    if whole is not None:
        result = {"steps": args.steps, "change": state["change"], "sha256": hashlib.sha256(whole.tobytes()).hexdigest()}
        print(json.dumps(result))
        if args.result is not None:
            args.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
