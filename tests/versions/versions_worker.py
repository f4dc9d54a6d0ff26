"""One rank of `import hvdtrain.torch` or `import hvdtrain.tensorflow`, on any of their versions."""

import sys

from ranks import report


def torch() -> int:
    import torch

    import hvdtrain.torch as hvd

    hvd.init()
    mean = (hvd.size() - 1) / 2
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        values = torch.full([1000], hvd.rank(), dtype=dtype)
        total = hvd.allreduce(values, op=hvd.Sum, name=f"values in {dtype}")
        assert total.tolist() == [mean * hvd.size()] * 1000
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = model.weight.detach().clone()
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    (model(torch.ones(1, 4)) * hvd.rank()).sum().backward()
    wrapped.step()
    torch.testing.assert_close(model.weight.detach(), before - mean)
    assert hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1) == {"rank": 1}
    return 6


def tensorflow() -> int:
    import tensorflow as tf

    import hvdtrain.tensorflow as hvd

    hvd.init()
    mean = (hvd.size() - 1) / 2
    weight = tf.Variable(tf.zeros([100_000]))

    def gradient() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight) * float(hvd.rank())
        return hvd.DistributedGradientTape(tape).gradient(loss, [weight])[0]

    for step in (gradient, tf.function(gradient)):
        for _ in range(3):
            assert float(tf.reduce_max(tf.abs(step() - mean))) == 0.0
    hvd.broadcast_variables([weight], root_rank=0)
    return 7


if __name__ == "__main__":
    report(cases={"torch": torch, "tensorflow": tensorflow}[sys.argv[1]]())
