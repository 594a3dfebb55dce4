"""Other programs' formats: steps written to and made from torch.save files, safetensors, and DCP folders."""
