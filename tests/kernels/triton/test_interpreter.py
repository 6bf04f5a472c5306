"""What tests spare the interpreter changes nothing that it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tests.kernels.triton.harness import DEVICE, ints
from tests.kernels.triton.interpreter import quickened

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="nothing is interpreted on a GPU")


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def sum_kernel(x, out):
    """It calls a function of this file, and one of the language's own."""
    at = tl.arange(0, 4)
    tl.store(out, tl.sum(doubled(tl.load(x + at)), axis=0))


@triton.jit
def product_kernel(x, out):
    tl.store(out, tl.load(x) * tl.load(x + 1))


@pytest.fixture(autouse=True, scope="module", params=[quickened, nullcontext], ids=["quick", "plain"])
def quick_interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test runs in the interpreter as it is as well."""
    with request.param():
        yield


def test_functions_of_several_files_are_interpreted_in_each_launch() -> None:
    for values in ((1, 2, 3, 4), (5, 0, 0, -7)):
        out = ints(0)
        sum_kernel[(1,)](ints(*values), out)
        assert out.tolist() == [2 * sum(values)]


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_what_overflows_wraps() -> None:
    out = ints(0)
    product_kernel[(1,)](ints(2**16, 2**15), out)
    assert out.tolist() == [-(2**31)]
    product_kernel[(1,)](ints(2**16, -(2**14)), out)
    assert out.tolist() == [-(2**30)]
