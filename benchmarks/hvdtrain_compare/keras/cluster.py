"""The processes of a parameter server of TensorFlow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def serve_unless_chief() -> Any:
    """Return the cluster on its chief; serve it on workers and servers, until the job is ended."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        server = tf.distribute.Server(
            resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc"
        )
        server.join()
    return resolver
