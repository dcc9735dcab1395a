"""What a process keeps of a group of processes that it has left: nothing."""

import pytest
import torch
import torch.distributed as dist

from rollstock import ModelSpec, Totals
from rollstock.backends.fsdp.backend import FSDPBackend
from rollstock.backends.fsdp.config import FSDPConfig
from rollstock.hardware.cpu import CPU
from rollstock.testing import make_batch

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}


@pytest.mark.skipif(
    not hasattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats"), reason="a torch without this cache"
)
def test_a_group_that_ended_is_in_no_cache_that_a_forked_process_would_empty() -> None:
    backend = FSDPBackend(FSDPConfig())
    backend.use_workers(0, 1)
    spec = ModelSpec(config={"model_type": "llama", **SIZES})
    backend.setup(spec, CPU(), trainable=True, total_updates=1)
    batch = make_batch(vocab_size=9)
    backend.update(
        batch,
        lambda micro: micro.loss(-micro.logprobs),
        outputs=["logprobs"],
        temperature=1.0,
        micro_batches=[list(range(len(batch)))],
        totals=Totals.of(batch, response_limit=16),
    )
    assert sum(torch._C._get_DTensor_sharding_propagator_cache_stats()) > 0
    backend.close()
    assert not dist.is_initialized()
    assert sum(torch._C._get_DTensor_sharding_propagator_cache_stats()) == 0
