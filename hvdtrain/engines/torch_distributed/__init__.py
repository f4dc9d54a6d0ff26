"""The gloo and nccl engines: process groups of torch.distributed."""
