"""sync_calls counts reductions that happened: checked against what DistributedDataParallel's own hook sees."""

import pytest
import torch
import torch.distributed as dist
from oracle import Recorder, flat_params
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from fullbatch import Accumulator


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
@pytest.mark.filterwarnings("ignore")  # torch's own, of gloo
@pytest.mark.parametrize(("micro_batch", "samples"), [(8, 8), (2, 8), (3, 8), (1, 5)])
def test_a_wrapped_model_reduces_once_a_window(one_rank, micro_batch, samples):
    reductions = []

    def hook(state, bucket):
        reductions.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    torch.manual_seed(0)
    plain = nn.Linear(3, 1)
    wrapped = DistributedDataParallel(nn.Linear(3, 1))
    wrapped.module.load_state_dict(plain.state_dict())
    wrapped.register_comm_hook(None, hook)
    batch = (torch.randn(samples, 3), torch.randn(samples, 1))
    for model in (plain, wrapped):
        step = Accumulator(model, Recorder(model), lambda m, b: mse_loss(m(b[0]), b[1]), micro_batch=micro_batch, check=False)
        for _ in range(3):
            assert step(batch).sync_calls == 1
    assert len(reductions) == 3  # one bucket: one reduction a window
    torch.testing.assert_close(flat_params(wrapped), flat_params(plain))
