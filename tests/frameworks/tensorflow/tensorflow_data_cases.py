"""A tape with the samplers of hvdtrain.data."""

from __future__ import annotations

from data_page import check_keras_loop
from tensorflow_training_cases import digest


def the_loop_of_the_data_page() -> str:
    return digest(check_keras_loop("tf.GradientTape"))


CASES = [the_loop_of_the_data_page]
