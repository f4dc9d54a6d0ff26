"""A loop of ParameterServerStrategy: a coordinator, a worker, a server, and an evaluator."""

import sys

import tensorflow as tf

folder = sys.argv[1]
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
task = resolver.task_type
if task in ("worker", "ps"):
    tf.distribute.Server(resolver.cluster_spec(), task, resolver.task_id, protocol="grpc").join()
if task == "evaluator":
    weight = tf.Variable(0.0)
    path = next(iter(tf.train.checkpoints_iterator(folder, timeout=300)))
    tf.train.Checkpoint(weight=weight).restore(path)
    print(f"evaluator: loss {float((weight - 3.0) ** 2)}", flush=True)
    sys.exit()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weight = tf.Variable(0.0)


@tf.function
def step() -> None:
    with tf.GradientTape() as tape:
        loss = (weight - 3.0) ** 2
    weight.assign_sub(0.25 * tape.gradient(loss, weight))


for _ in range(3):
    coordinator.schedule(step)
coordinator.join()
place = "the server" if "/job:ps/" in weight.device else weight.device
print(f"chief: weight {float(weight)} on {place}", flush=True)
tf.train.Checkpoint(weight=weight).save(f"{folder}/done")
