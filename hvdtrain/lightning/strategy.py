"""The strategy: one process a rank, whose gradients hvdtrain averages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import hvdtrain.torch as hvd
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.devices import device_index
from hvdtrain.lightning.environment import (
    EVALUATING,
    PYTORCH,
    HvdEnvironment,
    LayerSync,
    ParallelStrategy,
    divide_training,
    draw_together,
    load_fabric,
    omit_padding,
    synchronize_metrics,
    weight_of,
)
from hvdtrain.torch.functions import broadcast_module
from hvdtrain.torch.operations.parts import parameters_of
from hvdtrain.torch.sync_batch_norm import count_batches
from hvdtrain.types import ReduceOp

__all__ = ["HvdStrategy"]

# Also the names of torch.distributed's operations, which ends in "ReduceOp.SUM" or "RedOpType.SUM".
_OPERATIONS = {
    "mean": hvd.Average,
    "avg": hvd.Average,
    "sum": hvd.Sum,
    "min": hvd.Min,
    "max": hvd.Max,
    "product": hvd.Product,
}


def _operation(operation: Any) -> ReduceOp:
    name = "mean" if operation is None else str(operation).rpartition(".")[2].lower()
    if name not in _OPERATIONS:
        raise ValueError(f"reduce_op must be one of {', '.join(_OPERATIONS)}, got {operation!r}")
    return _OPERATIONS[name]


def _members(group: Any) -> hvd.ProcessSet:
    if group is None:
        return hvd.global_process_set
    if not isinstance(group, hvd.ProcessSet):
        raise ValueError(f"group must be a ProcessSet of hvdtrain, or None, got {group!r}")
    return group


_NEVER = 1 << 30


class BackwardReduction:
    """Reduces gradients at the end of a backward pass, before hooks and clipping see them."""

    def __init__(self, optimizer: hvd.DistributedOptimizer) -> None:
        self._optimizer = optimizer
        self.whole = True
        self._held = 0
        self._reduced = False

    @property
    def _waits(self) -> bool:
        """Whether the step itself reduces, gradients or weights."""
        return self._optimizer.exchanges_weights or (self._optimizer.sharded and not self.whole)

    def begin(self, blocked: bool) -> None:
        """Prepare for a backward pass."""
        if not self._optimizer.exchanges_weights:
            passes = _NEVER if blocked else self._held + 1
            self._optimizer.set_backward_passes_per_step(passes)

    @collective
    def end(self, blocked: bool, always: bool) -> None:
        """Reduce the gradients of a backward pass (collective, unless they are accumulated)."""
        pending = self._optimizer.pending
        if pending:
            self._reduced = False
        if blocked:
            self._held += pending
        elif (pending or always) and not self._waits:
            self._reduce()

    @collective
    def complete(self) -> None:
        """Reduce what no backward pass has, before a step."""
        if not self._waits and (self._optimizer.pending or not self._reduced):
            self._reduce()

    def _reduce(self) -> None:
        self._optimizer.synchronize()
        self._reduced = True

    def stepping(self) -> AbstractContextManager[None]:
        """Return the context of a step, which need not reduce again."""
        return nullcontext() if self._waits else self._optimizer.skip_synchronize()

    def forget(self) -> None:
        """Start over after a step."""
        self._held = 0
        self._reduced = False


_NORMALIZATION = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class HvdSyncBatchNorm(LayerSync):
    """Replaces batch normalization by `hvdtrain.torch.SyncBatchNorm` while a model is trained."""

    def __init__(self) -> None:
        self._originals: dict[torch.nn.Module, torch.nn.Module] = {}

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        def synchronized(layer: torch.nn.Module) -> torch.nn.Module | None:
            if not isinstance(layer, _BatchNorm) or isinstance(layer, hvd.SyncBatchNorm):
                return None
            made = hvd.SyncBatchNorm(
                *(layer.num_features, layer.eps, layer.momentum),
                *(layer.affine, layer.track_running_stats),
            )
            self._originals[made] = layer
            return made

        return _replaced(model, synchronized)

    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        return _replaced(model, lambda layer: self._originals.pop(layer, None))


def _replaced(
    model: torch.nn.Module, other: Callable[[torch.nn.Module], torch.nn.Module | None]
) -> torch.nn.Module:
    """Replace layers by others that have their parameters and statistics."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            made = other(layer)
            if made is not None:
                for part in _NORMALIZATION:
                    setattr(made, part, getattr(layer, part))
                made.train(layer.training)
                setattr(parent, name, made)
    return model


class HvdStrategy(ParallelStrategy):
    """Trains on the ranks that mpirun or `python -m hvdtrain run` has started (collective).

    Args:
        engine: "auto" or the name of an engine; None uses HVDTRAIN_ENGINE, or "auto".
        exact: whether each sample is used once, on one rank; otherwise Lightning repeats samples
            where the ranks would have different numbers of them. In training it supposes that a
            loss is the mean over a batch.
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        checkpoint_io: set by the Trainer, or what reads and writes checkpoints.
        precision_plugin: set by the Trainer, or a plugin.
        optimizer_options: options of `hvdtrain.torch.DistributedOptimizer`, but for those that
            Lightning determines.
    """

    # Of Lightning.
    model: Any
    optimizers: Any
    _layer_sync: Any

    def __init__(
        self,
        engine: str | None = None,
        exact: bool = True,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **optimizer_options: Any,
    ) -> None:
        hvd.init(engine=engine)
        super().__init__(
            accelerator, parallel_devices, HvdEnvironment(), checkpoint_io, precision_plugin
        )
        self._exact, self._options = exact, optimizer_options
        self._reductions: dict[int, BackwardReduction] = {}
        self._blocked = False
        self._weight = 1.0
        if exact:
            warnings.filterwarnings("ignore", message=EVALUATING)

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        devices: list[torch.device] = self.parallel_devices or [torch.device("cpu")]
        if devices[0].type != "cuda":
            return devices[0]
        topology = context.current().topology
        if len(devices) >= topology.local_size:
            return devices[topology.local_rank]
        return torch.device("cuda", device_index(topology, torch.cuda.device_count()))

    @property
    def is_distributed(self) -> bool:
        """Whether the Trainer gives loaders a DistributedSampler: always, so that the order of the
        samples does not depend on the number of ranks."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of a DistributedSampler."""
        return {"num_replicas": hvd.size(), "rank": hvd.rank()}

    def set_world_ranks(self) -> None:
        """Have only rank 0 print and log."""
        for module in (load_fabric("utilities.rank_zero"), PYTORCH.utilities.rank_zero):
            module.rank_zero_only.rank = hvd.rank()

    def setup_environment(self) -> None:
        """Set the device and the seeds of this rank."""
        super().setup_environment()
        load_fabric("utilities.seed").reset_seed()

    @collective
    def setup(self, trainer: Any) -> None:
        """Give all ranks the weights of rank 0, and wrap the optimizers (collective)."""
        if isinstance(self._layer_sync, PYTORCH.plugins.TorchSyncBatchNorm):
            self._layer_sync = HvdSyncBatchNorm()
        if self._layer_sync is not None and _fits(trainer):
            self.model = self._layer_sync.apply(self.model)
        synchronize_metrics(self.lightning_module)
        super().setup(trainer)
        if not _fits(trainer):
            broadcast_module(self.lightning_module)

    def model_to_device(self) -> None:
        """Move the model to the device of this rank."""
        self.model.to(self.root_device)

    @collective
    def setup_optimizers(self, trainer: Any) -> None:
        """Wrap the optimizers, which then have the weights and states of rank 0 (collective)."""
        super().setup_optimizers(trainer)
        broadcast_module(self.lightning_module)
        self.optimizers = list(map(self._wrap, self.optimizers))
        self._reductions = {id(each): BackwardReduction(each) for each in self.optimizers}

    @collective
    def _wrap(self, optimizer: torch.optim.Optimizer) -> hvd.DistributedOptimizer:
        """Return an optimizer that steps on the gradients of all ranks, with rank 0's state."""
        hvd.broadcast_optimizer_state(optimizer)
        if type(optimizer) is hvd.DistributedOptimizer:
            return optimizer
        named = list(self.lightning_module.named_parameters())
        known = {id(parameter) for _, parameter in named}
        names = named if all(id(p) in known for p in parameters_of(optimizer)) else None
        return hvd.DistributedOptimizer(optimizer, named_parameters=names, **self._options)

    def setup_precision_plugin(self) -> None:
        """Connect the plugin, and tell its loss scaler to exchanges that keep gradients."""
        super().setup_precision_plugin()
        scaler = getattr(self.precision_plugin, "scaler", None)
        for optimizer in self.optimizers:
            optimizer.loss_scaler = scaler
        trainer = self.lightning_module.trainer
        automatic = self.lightning_module.automatic_optimization
        for reduction in self._reductions.values():
            clips = trainer.gradient_clip_val is not None
            reduction.whole = clips or scaler is not None or not automatic

    @collective
    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Compute gradients and reduce them, unless they are only accumulated (collective)."""
        module, plugin, blocked = self.lightning_module, self.precision_plugin, self._blocked
        for reduction in self._reductions.values():
            reduction.begin(blocked)
        if self._weight != 1.0:
            closure_loss = closure_loss * self._weight
        self.pre_backward(closure_loss)
        loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(loss, module, optimizer, *args, **kwargs)
        for reduction in self._reductions.values():
            reduction.end(blocked, module.automatic_optimization)
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        result: torch.Tensor = loss
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context in which gradients are accumulated, and not reduced."""
        before, self._blocked = self._blocked, True
        try:
            yield
        finally:
            self._blocked = before

    @collective
    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Take a step on the reduced gradients (collective)."""
        reduction = self._reductions[id(optimizer)]

        def complete() -> Any:
            loss = closure()
            reduction.complete()
            if not isinstance(optimizer, torch.optim.LBFGS):
                return loss
            # Its line search compares losses, which must be those of all samples.
            return self.reduce(loss * self._weight)

        with reduction.stepping():
            result = super().optimizer_step(optimizer, complete, model, **kwargs)
        reduction.forget()
        return result

    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader that gives each sample to one rank."""
        trainer = self.lightning_module.trainer
        if not self._exact:
            return dataloader
        draw_together(dataloader)
        if trainer.training:
            return divide_training(dataloader, trainer)
        omit_padding(dataloader)
        return dataloader

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note the weight of this rank's part of a short last batch."""
        averages = not any(optimizer.exchanges_weights for optimizer in self.optimizers)
        self._weight = weight_of(batch_idx, self.lightning_module.trainer) if averages else 1.0
        count_batches(self.lightning_module, self._weight > 0)

    @collective
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over all ranks, or anything else as it is (collective)."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        op = _operation(reduce_op)
        if op is hvd.Average and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.double()
        return hvd.allreduce(tensor, op=op, process_set=_members(group))

    @collective
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks (collective)."""
        hvd.barrier()

    @collective
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one rank on every rank (collective)."""
        return hvd.broadcast_object(obj, src)

    @collective
    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Return the tensors of all ranks, [size, ...] (collective)."""
        members = _members(group)
        if not sync_grads or not tensor.requires_grad:
            return hvd.allgather(tensor.detach()[None], process_set=members)
        own = tensor[None]
        # hvdtrain, as Horovod, averages them.
        own.register_hook(lambda gradient: gradient * members.size())
        return hvd.allgather(own, process_set=members)

    @collective
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, and give all ranks the states of rank 0 (collective)."""
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            hvd.broadcast_optimizer_state(optimizer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the model, after an exchange of weights if one is due."""
        self._flush()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    @collective
    def on_validation_start(self) -> None:
        """Have all ranks evaluate one model, with the buffers of rank 0 (collective)."""
        self._flush()
        hvd.broadcast_parameters(dict(self.lightning_module.named_buffers()))

    @collective
    def on_train_end(self) -> None:
        """Exchange weights if that is due (collective)."""
        self._flush()

    def _flush(self) -> None:
        for optimizer in self.optimizers:
            if id(optimizer) in self._reductions:
                optimizer.flush()

    def on_exception(self, exception: BaseException) -> None:
        """Give the optimizers back as they are, because other ranks may continue (local)."""
        self._unwrap_optimizers()

    def teardown(self) -> None:
        """Give the model its own layers and the Trainer its own optimizers again.

        With sharded=True the optimizers then have their whole state: where ranks share no memory,
        that is collective, but not after an exception.
        """
        super().teardown()
        self._unwrap_optimizers()
        if self.lightning_module is not None:
            count_batches(self.lightning_module, True)
        if isinstance(self._layer_sync, HvdSyncBatchNorm) and self.model is not None:
            self.model = self._layer_sync.revert(self.model)

    def _unwrap_optimizers(self) -> None:
        self.optimizers = [
            each._optimizer if type(each) is hvd.DistributedOptimizer else each
            for each in self.optimizers
        ]
        self._reductions.clear()


def _fits(trainer: Any) -> bool:
    return bool(trainer.state.fn == "fit")
