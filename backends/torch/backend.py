"""The torch backend: one transformers model in one process, trained by AdamW.

For runs that fit one device. Sequences are packed without padding, prompts that a group shares are computed once,
logits exist only where there is loss, and master weights stay float32 whatever the products run in. Cutting batches is
left to the scheduler, several processes to other backends: `PackedBackend` is what they have in common with this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from rollstock import (
    Backend,
    BackendState,
    Batch,
    Device,
    LossFunction,
    LowRank,
    Metric,
    Metrics,
    MicroBatch,
    ModelSpec,
    Router,
    RunConfig,
    Totals,
    UserError,
    derive_seed,
    fingerprint,
    merge_metrics,
)
from rollstock.backends.classification import classifier_config, saved_score_weight, score_weight_name
from rollstock.backends.llama import OtherPartsError
from rollstock.backends.models import build_model, checkpoint_weights
from rollstock.backends.moe import Record, has_experts
from rollstock.backends.prefix_tree import first_places
from rollstock.backends.torch import lora
from rollstock.backends.torch.check import check_network, lean_layers
from rollstock.backends.torch.compiling import compile_layers
from rollstock.backends.torch.config import TorchConfig
from rollstock.backends.torch.footprint import Footprint, cut_to_fit, footprint_of
from rollstock.backends.torch.layout import Layout, make_layout
from rollstock.backends.torch.network import VALUE_HEAD, Network
from rollstock.backends.torch.optimizer import Optimizer
from rollstock.backends.torch.room import Room, Work
from rollstock.backends.torch.routing import StreamRouting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CPU_MIB = 768


T = TypeVar("T", bound=TorchConfig)


class PackedBackend(Backend[T]):
    """Trains one model on packed streams.

    What several processes do otherwise, they say in `_spread`, `_slices`, `_backward`, `_full` and `_part`: here there
    is one, which has all weights.
    """

    _network: Network
    _score_name: str
    _optimizer: Optimizer | None
    _device: Device[Any]

    _router: Router[Any] | None = None
    _routing: StreamRouting | None = None

    def validate(self, config: RunConfig, role: str) -> Sequence[str]:
        """See `Backend.validate`."""
        if role != "actor" or config.weight_sync.content != "adapters" or self.config.lora.rank:
            return []
        return ["weight_sync.content: adapters are to be sent, and backend.lora.rank 0 has none; set one of the two"]

    def use_router(self, router: Router[Any]) -> None:
        """See `Backend.use_router`."""
        self._router = router

    def setup(self, model: ModelSpec, device: Device[Any], *, trainable: bool, total_updates: int) -> None:
        """See `Backend.setup`. A model that gives other results packed than alone is refused here."""
        self._device = device
        built = build_model(model)
        if self._router is not None:
            self._routing = StreamRouting(built, self._router, model.seed)
        self._score_name = score_weight_name(built) if model.head == "score" else ""
        if trainable and self.config.lora.rank:
            lora.add_adapters(built, self.config.lora, derive_seed(model.seed, "lora"))
        network = Network(built, head=model.head, logits_bytes=self.config.logits_memory_mib << 20)
        if model.head == "score" and model.path is not None:
            network.start_head(saved_score_weight(Path(model.path).expanduser(), self._score_name))
        network.to(self._first_device())
        check_network(network, share_prompts=self.config.share_prompts)
        if not trainable:
            network.requires_grad_(False)
        elif self.config.activation_checkpointing:
            _checkpoint_activations(built)
        if self.config.compile.enabled:
            compile_layers(network, self.config.compile, self._device.torch_device())
        else:
            self._choose_layers(network)
        self._network = network
        # A router counts last tokens too; that one which changes nothing changes no bit, experts always read them.
        self._keep_last = model.head == "score" or has_experts(built)
        self._spread()
        self._optimizer = self._make_optimizer(total_updates) if trainable else None

    def _first_device(self) -> torch.device:
        """Where the network is when it is checked."""
        return self._device.torch_device()

    def _spread(self) -> None:
        """Share the network, which was just checked, out among the processes that train it."""

    def _make_optimizer(self, total_updates: int) -> Optimizer:
        return Optimizer(self._trained(), self.config, total_updates)

    def _choose_layers(self, network: Network) -> None:
        """Raises UserError if `layers: lean` is asked for and cannot be."""
        if self.config.layers == "modules":
            return
        try:
            if self.config.compute_dtype != "float32":  # lower precisions round at places of their own
                raise OtherPartsError(f"products in {self.config.compute_dtype} are left to modules")
            network.lean = lean_layers(
                network,
                share_prompts=self.config.share_prompts,
                checkpointed=self.config.activation_checkpointing,
            )
        except OtherPartsError as reason:
            if self.config.layers == "lean":
                raise UserError(
                    f"backend.layers: lean does not work with this model: {reason}; choose auto"
                ) from reason

    @torch.no_grad()
    def forward(
        self, batch: Batch, columns: Sequence[str], *, temperature: float, micro_batches: Sequence[Sequence[int]]
    ) -> dict[str, Tensor]:
        """See `Backend.forward`; tokens that the policy did not choose get 0."""
        found = {name: torch.zeros(batch.num_tokens) for name in columns}
        parts = torch.arange(batch.num_tokens).split(batch.lengths.tolist())

        def work(indices: Sequence[int], cut: Batch) -> None:
            with self._pass(cut) as (part, layout, _):
                outputs = self._outputs(part, layout, columns, temperature)
            where = torch.cat([parts[i] for i in indices]) if indices else torch.zeros(0, dtype=torch.int64)
            for name, value in outputs.items():
                found[name][where] = value.cpu()

        self._each(batch, micro_batches, work, begin=lambda: None)
        return found

    def update(
        self,
        batch: Batch,
        loss: LossFunction,
        *,
        outputs: Sequence[str],
        temperature: float,
        micro_batches: Sequence[Sequence[int]],
        totals: Totals,
    ) -> Metrics:
        """See `Backend.update`."""
        optimizer, routing = self._optimizer, self._routing
        if optimizer is None:
            raise UserError("backend: this model was set up without an optimizer (a reference is not trained)")
        measured: list[Metrics] = []

        def begin() -> None:
            measured.clear()
            optimizer.zero_grad()
            if routing is not None:
                routing.forget()

        def work(_: Sequence[int], cut: Batch) -> None:
            with self._pass(cut) as (part, layout, record):
                flat = self._outputs(part, layout, outputs, temperature)
                here = part.to(self._device.torch_device())
                result = loss(MicroBatch(here, totals, {name: here.pad(value) for name, value in flat.items()}))
                value, metrics = result.value, [result.metrics]
                if routing is not None and layout is not None and record is not None:
                    balance, routed = routing.observe(record, part, layout, totals)
                    value = value if balance is None else value + balance
                    metrics.append(routed)
                self._backward(value, flat)
            measured.extend(metrics)

        self._each(batch, micro_batches, work, begin=begin)
        measured += [optimizer.step(), self._memory_metrics()]
        return merge_metrics([*measured, {} if routing is None else self._finish_routing(routing)])

    def _each(
        self,
        batch: Batch,
        micro_batches: Sequence[Sequence[int]],
        work: Work,
        *,
        begin: Callable[[], None],
    ) -> None:
        """Do the work of every slice, after `begin`, which makes everything as it was before the first."""
        begin()
        for indices, cut in self._slices(batch, micro_batches):
            work(indices, cut)

    def _slices(self, batch: Batch, micro_batches: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], Batch]]:
        """The slices of a batch, each with its indices, in the order in which they go through the model."""
        return ((indices, batch.select(indices)) for indices in micro_batches)

    def _memory_metrics(self) -> Metrics:
        """What an update says of memory."""
        return {}

    def _backward(self, loss: Tensor, outputs: Mapping[str, Tensor]) -> None:
        """Add the gradients of a slice's loss, whose `outputs` the model gave."""
        if loss.requires_grad:
            loss.backward()

    def _finish_routing(self, routing: StreamRouting) -> Metrics:
        return routing.finish_update()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.weights`. Without adapters these are the tensors in training themselves."""
        own = ((name, self._full(tensor)) for name, tensor in self._named() if not name.startswith(VALUE_HEAD))
        return lora.merged(self._network.model, own, full=self._full)

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.base_weights`."""
        hidden = (VALUE_HEAD, lora.PREFIX)
        return ((name, self._full(tensor)) for name, tensor in self._named() if not name.startswith(hidden))

    def adapters(self) -> Iterator[tuple[str, LowRank]]:
        """See `Backend.adapters`."""
        return lora.additions(self._network.model, full=self._full)

    def fingerprint(self) -> str:
        """See `Backend.fingerprint`."""
        return fingerprint(self.weights())

    def state(self) -> BackendState:
        """See `Backend.state`; the tensors are the live ones."""
        tensors = {"model": {name: tensor.detach() for name, tensor in self._named()}}
        if self._optimizer is None:
            return BackendState(tensors)
        tensors["optimizer"] = self._optimizer.tensors()
        return BackendState(tensors, {"optimizer": self._optimizer.values()})

    @torch.no_grad()
    def load_state(self, state: BackendState) -> None:
        """See `Backend.load_state`."""
        saved = state.tensors["model"]
        mine = dict(self._named())
        _check_fit(saved, mine)
        for name, tensor in mine.items():
            tensor.copy_(self._part(saved[name], tensor))
        if self._optimizer is not None:
            self._optimizer.load(state.tensors.get("optimizer", {}), state.values["optimizer"])

    def save_config(self, path: Path) -> None:
        """See `Backend.save_config`."""
        path.mkdir(parents=True, exist_ok=True)
        model = self._network.model
        is_reward_model = self._network.head == "score"
        config = classifier_config(model) if is_reward_model else type(model.config).from_dict(model.config.to_dict())
        if not is_reward_model:
            config.architectures = [type(model).__name__]
        config.dtype = torch.float32
        config.save_pretrained(path)
        if model.generation_config is not None and not is_reward_model:
            model.generation_config.save_pretrained(path)

    def export_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Backend.export_weights`; needs a backend that is set up, for the shapes of its layers."""
        plain = {name: tensor for name, tensor in tensors.items() if not name.startswith(VALUE_HEAD)}
        weights = checkpoint_weights(self._network.model, lora.merge_saved(self._network.model, plain))
        if self._score_name:
            weights[self._score_name] = tensors[f"{VALUE_HEAD}weight"]
        return weights

    def close(self) -> None:
        """See `Backend.close`."""
        self.__dict__.pop("_network", None)
        self._optimizer = None
        if "_device" in self.__dict__:
            self._device.release_memory()

    @contextmanager
    def _pass(self, batch: Batch) -> Iterator[tuple[Batch, Layout | None, Record | None]]:
        """Around one pass over a slice, its backward pass included: the slice, its layout (None where the policy chose
        nothing), and what the router chooses in it, in runs that have one."""
        if not bool(batch.flat("action_mask").any()):
            yield batch, None, None
        elif self._routing is None:
            layout = make_layout(batch, share_prompts=self.config.share_prompts, keep_last=self._keep_last)
            yield batch, layout, None
        else:
            marks = self._routing.marks(batch)
            layout = make_layout(batch, share_prompts=self.config.share_prompts, marks=marks)
            tokens = self._routing.tokens(batch, layout).to(self._device.torch_device())
            with self._routing.routed.routing(tokens) as record:
                yield batch, layout, record

    def _outputs(
        self, batch: Batch, layout: Layout | None, names: Sequence[str], temperature: float
    ) -> dict[str, Tensor]:
        """Flat `[N]` tensors on the device: the model's outputs where the policy chose the token, 0 elsewhere."""
        device = self._device.torch_device()
        chosen = batch.flat("action_mask").nonzero()[:, 0]
        if layout is None:
            return {name: torch.zeros(batch.num_tokens, device=device) for name in names}
        where = layout.responses if self._network.head == "score" else layout.predicts
        index, targets = where[chosen], batch.flat("response")[chosen]
        back = None
        if layout.again is not None:  # what several trajectories ask for is computed once
            asked = index * self._network.vocabulary + targets
            first, back = first_places(asked)
            index, targets, back = index[first], targets[first], back.to(device)
        with self._autocast():
            found = self._network(
                layout.to(device), names, index.to(device), targets.to(device), temperature if temperature > 0 else 1.0
            )
        if back is not None:
            found = {name: value.index_select(0, back) for name, value in found.items()}
        chosen = chosen.to(device)
        return {name: value.new_zeros(batch.num_tokens).index_put((chosen,), value) for name, value in found.items()}

    def _autocast(self) -> AbstractContextManager[Any]:
        return self._device.autocast(DTYPES[self.config.compute_dtype])

    def _full(self, tensor: Tensor) -> Tensor:
        """The whole of a weight of which this process may hold a part, without a gradient."""
        return tensor.detach()

    def _part(self, full: Tensor, like: Tensor) -> Tensor:
        """What this process holds of a whole weight, given the one that it is for."""
        return full

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """All weights by their public names."""
        return ((lora.public_name(name), tensor) for name, tensor in self._network.weights())

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        network = self._network
        return [
            (lora.public_name(name), tensor)
            for name, tensor in network.weights()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        ]


class TorchBackend(PackedBackend[TorchConfig]):
    """Holds one model on one device. A micro-batch for which the memory is too small is done in halves."""

    _room: Room | None = None
    _footprint: Footprint | None = None

    def _spread(self) -> None:
        most = self.config.activation_memory_mib or (_CPU_MIB if self._device.torch_device().type == "cpu" else 0)
        if most and self._routing is None:
            again = self.config.activation_checkpointing
            self._footprint = footprint_of(self._network, most=most << 20, checkpointed=again)

    def _memory_metrics(self) -> Metrics:
        failures = 0 if self._room is None else self._room.take_failures()
        return {"perf/num_allocation_failures": Metric(failures, 1.0, "sum")}

    def _each(
        self,
        batch: Batch,
        micro_batches: Sequence[Sequence[int]],
        work: Work,
        *,
        begin: Callable[[], None],
    ) -> None:
        before: list[tuple[Tensor | None, int]] = []

        def marked(indices: Sequence[int], cut: Batch) -> None:
            before[:] = self._gradients()
            work(indices, cut)

        def is_intact() -> bool:
            # What a router counts it counts before the backward pass, which may be what failed.
            return self._routing is None and all(
                old is new and version == now
                for (old, version), (new, now) in zip(before, self._gradients(), strict=True)
            )

        if self._room is None:
            self._room = Room(self._device)
        if self._footprint is not None and torch.is_grad_enabled():
            micro_batches = cut_to_fit(batch, micro_batches, self._footprint, share_prompts=self.config.share_prompts)
        self._room.each(batch, micro_batches, marked, begin=begin, is_intact=is_intact)

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        """The gradient of each weight, with the number that torch raises whenever it is changed."""
        found = (tensor.grad for _, tensor in self._trained())
        return [(gradient, 0 if gradient is None else gradient._version) for gradient in found]


def _checkpoint_activations(model: PreTrainedModel) -> None:
    """Raises UserError if the model's layers cannot be computed again."""
    # The older name is deprecated where there is a newer one.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False, "preserve_rng_state": False})
    except ValueError as error:
        raise UserError(f"backend.activation_checkpointing: {error}") from error


def _check_fit(saved: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
    """Raise UserError for the first tensor that is missing, unknown or of another shape."""
    if lora.shapes(saved) != lora.shapes(mine):
        raise UserError(lora.mismatch(saved, mine))
    for name, tensor in mine.items():
        if name not in saved:
            raise UserError(f"the checkpoint has no weight {name!r}, which this model has")
        if saved[name].shape != tensor.shape:
            raise UserError(
                f"the checkpoint's {name!r} has shape {list(saved[name].shape)}, this model's has {list(tensor.shape)}"
            )
    unknown: Iterable[str] = saved.keys() - mine.keys()
    if unknown:
        raise UserError(f"the checkpoint has a weight {min(unknown)!r}, which this model has not")
