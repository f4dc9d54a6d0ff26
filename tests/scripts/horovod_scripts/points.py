"""Points of a plane in two classes, and a network that learns them."""

import torch
from torch.utils.data import Dataset


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(count, 2, generator=generator)
        self.classes = (self.points.prod(dim=1) > 0).long()

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], self.classes[index]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(2, 16)
        self.fc2 = torch.nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.fc2(torch.tanh(self.fc1(x))), dim=1)
