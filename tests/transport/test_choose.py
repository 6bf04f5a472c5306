from __future__ import annotations

import pytest

from alignedserve.transport.choose import TRANSPORTS, choose_transport
from alignedserve.transport.fingerprint import differences


@pytest.mark.parametrize(
    ("have_cuda", "same_host", "transport"),
    [(True, True, "ipc"), (False, True, "host"), (False, False, "gloo")],
)
def test_the_machine_chooses(have_cuda: bool, same_host: bool, transport: str) -> None:
    assert (
        choose_transport(have_cuda, same_host) == choose_transport(have_cuda, same_host, "auto") == transport
    )


def test_nccl_is_never_chosen_unasked() -> None:
    with pytest.raises(ValueError, match="link='auto': .* have only nccl, on request"):
        choose_transport(have_cuda=True, same_host=False)


@pytest.mark.parametrize(
    ("have_cuda", "same_host", "override"),
    [
        (True, True, "host"),
        (False, True, "gloo"),
        (True, True, "nccl"),
        (True, True, "ipc"),
        (False, True, "ipc"),
    ],
)
def test_the_operator_overrides(have_cuda: bool, same_host: bool, override: str) -> None:
    assert choose_transport(have_cuda, same_host, override) == override


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="link='nvlink': must be one of auto, nccl, gloo, ipc, host$"):
        choose_transport(True, True, "nvlink")
    assert list(TRANSPORTS) == ["nccl", "gloo", "ipc", "host"]


@pytest.mark.parametrize(
    ("have_cuda", "same_host", "override", "why"),
    [
        (False, True, "nccl", "need a GPU"),
        (True, True, "gloo", "CPU memory only"),
        (False, False, "host", "the pool's host"),
        (False, False, "ipc", "on one host"),
        (True, False, "ipc", "on one host"),
    ],
)
def test_what_cannot_work_is_refused(have_cuda: bool, same_host: bool, override: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"link='{override}'.*{why}"):
        choose_transport(have_cuda, same_host, override)


def test_differences_are_named_with_both_values() -> None:
    ours = {"model": "opt-13b", "dtype": "float16", "layout": "a"}
    theirs = {"model": "opt-13b", "dtype": "bfloat16", "tp": "2"}
    assert differences(ours, ours, "prefill-0", "decode-0") == ""
    assert differences(ours, theirs, "prefill-0", "decode-0") == (
        "dtype is 'float16' at prefill-0 and 'bfloat16' at decode-0; "
        "layout is 'a' at prefill-0 and not given at decode-0; "
        "tp is not given at prefill-0 and '2' at decode-0"
    )
