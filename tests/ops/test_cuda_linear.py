from __future__ import annotations

import pytest
import torch

from alignedserve.ops.base import Activation
from alignedserve.ops.cuda_linear import own_part
from alignedserve.ops.torch_ops import TorchLinear
from tests.kernels.triton.harness import DEVICE

pytest.importorskip("triton")


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_step_that_yields_no_token_has_no_rows_in_its_last_layer(
    activation: Activation, has_bias: bool
) -> None:
    weight = TorchLinear(
        torch.randn(96, 64).to(DEVICE), torch.randn(96).to(DEVICE) if has_bias else None, activation
    )
    found = own_part(torch.empty(0, 64, device=DEVICE), weight)
    assert found.shape == (0, 48 if activation.is_gated else 96)


def test_without_rows_the_residual_stays_as_it_is() -> None:
    residual = torch.empty(0, 96, device=DEVICE)
    weight = TorchLinear(torch.randn(96, 64).to(DEVICE), None, Activation.NONE)
    assert own_part(torch.empty(0, 64, device=DEVICE), weight, residual) is residual
