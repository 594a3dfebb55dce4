"""A plain loop under DeepSpeed's ZeRO; the lines that make it survive failures are marked with `<-`.

    resilio-launch --nproc-per-node 2 examples/train_deepspeed.py --epochs 3 --stage 3

Interrupted or not, it ends with the same bits as long as the number of ranks stays the same.
"""

import argparse
import time

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from resilio_hpc.frameworks.deepspeed import DeepSpeedSteps  # <-


class Sine(Dataset):
    """A noisy sine; its noise is drawn each time."""

    def __init__(self, samples: int) -> None:
        self.x = torch.rand(samples, 1, generator=torch.Generator().manual_seed(0)) * 6 - 3

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[number], torch.sin(self.x[number]) + 0.05 * torch.randn(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--every", type=int, default=10, help="save a checkpoint every so many steps")
    parser.add_argument("--width", type=int, default=32, help="of the hidden layer")
    parser.add_argument("--stage", type=int, default=3, help="of ZeRO: 1, 2 or 3")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--offload", action="store_true", help="have DeepSpeed's Adam in memory of the host")
    parser.add_argument("--own-loader", action="store_true", help="have deepspeed.initialize make the loader")
    parser.add_argument("--accumulate", type=int, default=1, help="batches for one step of the optimizer")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="how much longer a batch takes")
    args = parser.parse_args()

    torch.set_num_threads(1)
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": args.accumulate,
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 40},
        "gradient_clipping": 1.0,
    }
    if args.precision == "bf16":
        settings["bf16"] = {"enabled": True}
    elif args.precision == "fp16":  # a scale that soon changes: down, since gradients overflow, then up
        settings["fp16"] = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 5, "hysteresis": 1}
    if args.offload:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    layers = nn.Linear(1, args.width), nn.LayerNorm(args.width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(args.width, 1)
    model = nn.Sequential(*layers)
    kind = deepspeed.ops.adam.DeepSpeedCPUAdam if args.offload else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    data = Sine(args.samples)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings, training_data=data
    )
    if args.own_loader:
        sampler = loader.data_sampler
    else:
        sampler = DistributedSampler(data)
        loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=args.workers)
    torch.manual_seed(1 + engine.global_rank)
    dtype = next(engine.module.parameters()).dtype

    steps = DeepSpeedSteps(engine, loader, every=args.every)  # <-
    for epoch in steps.epochs(args.epochs):  # <-
        sampler.set_epoch(epoch)
        for x, y in loader:
            time.sleep(args.step_seconds)
            loss = nn.functional.mse_loss(engine(x.to(dtype)), y.to(dtype))
            engine.backward(loss)
            engine.step()


if __name__ == "__main__":
    main()
