"""Run a script whose Accelerate makes torchdata's StatefulDataLoader of its loaders: stateful.py SCRIPT [WORD…]."""

from __future__ import annotations

import runpy
import sys

import accelerate
from accelerate.utils import DataLoaderConfiguration

from tests.support.frameworks.scaled import plant

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    loaders = DataLoaderConfiguration(use_stateful_dataloader=True)
    plant(accelerate.Accelerator, lambda self, make: make(dataloader_config=loaders))
    runpy.run_path(sys.argv[0], run_name="__main__")
