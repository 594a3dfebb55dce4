"""A small GPT-2 under Hugging Face's Trainer; the lines that make it survive failures are marked with `<-`.

    resilio-launch --nproc-per-node 2 examples/train_transformers.py --epochs 3
    python examples/train_transformers.py --epochs 3

Interrupted or not, it ends with the same bits as long as the number of ranks stays the same.
"""

import argparse
import time

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from resilio_hpc.frameworks.transformers import make_resilient  # <-


class Digits(Dataset):
    """Sequences that count up, from a random digit."""

    def __init__(self, samples: int, step_seconds: float) -> None:
        self.starts = torch.randint(10, (samples,), generator=torch.Generator().manual_seed(0))
        self.step_seconds = step_seconds

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        time.sleep(self.step_seconds / 4)
        tokens = (self.starts[number] + torch.arange(12)) % 10
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--every", type=int, default=10, help="save a checkpoint every so many steps")
    parser.add_argument("--accumulate", type=int, default=1, help="batches for one step of the optimizer")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="how much longer a batch takes")
    args = parser.parse_args()

    torch.set_num_threads(1)
    settings = TrainingArguments(
        output_dir="trainer", num_train_epochs=args.epochs, per_device_train_batch_size=4, use_cpu=True, seed=1,
        gradient_accumulation_steps=args.accumulate, logging_steps=1, save_strategy="no", eval_strategy="epoch",
        report_to=[], disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_positions=12, n_embd=16, n_layer=1, n_head=2))
    data = Digits(args.samples, args.step_seconds)
    trainer = Trainer(model, settings, train_dataset=data, eval_dataset=Digits(8, 0.0))
    make_resilient(trainer, every=args.every)  # <-
    trainer.train()


if __name__ == "__main__":
    main()
