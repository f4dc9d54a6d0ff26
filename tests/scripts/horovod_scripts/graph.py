"""A script as people wrote them for Horovod and TensorFlow 1: one graph, a hook, a session."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf
from horovod.common.util import extension_available, gpu_available, nccl_built
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.mpi_ops import Average, rank, size
from ranks import report

tf.disable_v2_behavior()

STEPS = 5
RATE = 0.05


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS, size(), 8, 4)).astype(np.float32)
    return x, (x @ np.array([1.0, -2.0, 3.0, 0.5], np.float32))[..., None]


def main() -> None:
    hvd.init()
    assert extension_available("tensorflow")
    assert not gpu_available("tensorflow")
    assert nccl_built() == 0
    config = tf.ConfigProto(inter_op_parallelism_threads=1)
    config.gpu_options.visible_device_list = str(hvd.local_rank())

    features = tf.placeholder(tf.float32, [None, 4])
    targets = tf.placeholder(tf.float32, [None, 1])
    initial = tf.random_normal_initializer(seed=1 + rank())  # other weights on each rank
    weights = tf.get_variable("weights", [4, 1], initializer=initial)
    loss = tf.losses.mean_squared_error(targets, tf.matmul(features, weights))
    optimizer = tf.train.MomentumOptimizer(RATE, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=Compression.none, op=Average)
    step = tf.train.get_or_create_global_step()
    train = optimizer.minimize(loss, global_step=step)
    with tf.control_dependencies([train]):
        updated = weights + 0.0
    mean_loss = hvd.allreduce(loss, name="mean loss")

    x, y = data()
    hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=STEPS)]
    losses: list[float] = []
    with tf.train.MonitoredTrainingSession(hooks=hooks, config=config) as session:
        began = session.run(weights)
        while not session.should_stop():
            number = len(losses)
            feeds = {features: x[number, rank()], targets: y[number, rank()]}
            mean, ended = session.run([mean_loss, updated], feeds)
            losses.append(float(mean))
    kept, velocity = began.astype(np.float64), np.zeros((4, 1))
    for number in range(STEPS):
        all_x, all_y = x[number].reshape(-1, 4), y[number].reshape(-1, 1)
        gradient = 2 * all_x.T @ (all_x @ kept - all_y) / len(all_x)
        velocity = 0.9 * velocity + gradient
        kept = kept - RATE * velocity
    np.testing.assert_allclose(ended, kept, rtol=1e-4, atol=1e-5)
    assert broadcast_object(ended.tolist(), root_rank=0) == ended.tolist()
    assert losses[-1] < losses[0]
    report(cases=1, payload=[began.tolist(), ended.tolist(), losses])


if __name__ == "__main__":
    main()
