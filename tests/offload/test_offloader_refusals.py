"""Arguments that an Offloader refuses, and its errors when a device fails."""

from __future__ import annotations

import os

import pytest
import stillframe
import torch
from fix_offloading import group, same
from fix_waits import leased
from stillframe.offload import Offloader

MIB = 1 << 20


# ---- bad input ---------------------------------------------------------------------------------


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (lambda: torch.ones(3), TypeError, "a list of tensors, not Tensor"),
        (lambda: 3, TypeError, "a list of tensors, not int"),
        (lambda: [torch.ones(3), 4], TypeError, "number 1 is of type int"),
        (lambda: [torch.ones(3).to_sparse()], TypeError, "number 0 is a Tensor of layout"),
        (lambda: [torch.ones(3).as_subclass(_Subclass)], TypeError, "a _Subclass of layout"),
        (lambda: [torch.ones(3, device="meta")], ValueError, "number 0 is on meta"),
    ],
)
def test_offload_refuses_anything_but_plain_device_tensors(either, engine, given, error, text):
    with Offloader("cpu", engine=engine) as offloader:
        for call in (offloader.offload, offloader.adopt, offloader.onload, offloader.prefetch):
            with pytest.raises(error, match=text):
                call(given())
        assert leased(engine) == 0 and offloader.stats()["slots_in_use"] == 0


def test_wrong_options_and_uses_out_of_order_are_refused(either, engine):
    with pytest.raises(ValueError, match="at least, got 0"):
        Offloader("cpu", slots=0, engine=engine)
    with pytest.raises(ValueError, match="CUDA devices and the CPU, not meta"):
        Offloader("meta", engine=engine)
    offloader = Offloader("cpu", engine=engine)
    ticket = offloader.offload(group(1))
    with pytest.raises(stillframe.StillframeError, match="is not on the device"):
        offloader.release(ticket)
    released = offloader.offload(group(2))
    released.release()
    for call in (released.release, released.tensors, lambda: offloader.onload(released)):
        with pytest.raises(stillframe.StillframeError, match="was released"):
            call()
    offloader.close()
    offloader.close()
    with pytest.raises(stillframe.StillframeError, match="Offloader was closed"):
        offloader.onload(ticket)
    assert same(ticket.tensors(), group(1))


def test_closed_engine_raises_and_offloaded_tensors_stay_readable(either):
    engine = stillframe.Engine(pool_bytes=8 * MIB, block_bytes=MIB)
    offloader = Offloader("cpu", engine=engine)
    ticket = offloader.offload(group(1))
    on_device = offloader.onload(ticket)
    engine.close()
    for call in (offloader.offload, offloader.onload, offloader.prefetch):
        with pytest.raises(stillframe.StillframeError, match="the engine was closed"):
            call(group(2))
    assert same(ticket.tensors(), group(1)) and same(on_device, group(1))
    offloader.close()


def test_forked_child_cannot_use_its_parents_offloader_and_disturbs_nothing(either, engine):
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.offload(group(1))
        ticket.wait()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for call in (
                    ticket.tensors,
                    ticket.release,
                    lambda: offloader.onload(ticket),
                    offloader.stats,
                    offloader.close,
                ):
                    with pytest.raises(stillframe.ForkError):
                        call()
                del ticket
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert same(offloader.onload(ticket), group(1))


# ---- devices that fail --------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuStreamWaitEvent"])
def test_failed_copy_to_the_device_is_raised_and_the_next_one_works(fake, engine, call):
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.offload(group(1))
        ticket.wait()
        fake.fail(call, code=1)
        with pytest.raises(stillframe.StillframeError, match="could not be brought: device 0"):
            offloader.onload(ticket)
        assert fake.hits == 1
        assert offloader.stats()["slots_in_use"] == 0
        assert same(offloader.onload(ticket), group(1))


def test_failed_copy_from_the_device_is_raised_and_the_next_one_works(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        fake.fail("cuMemcpyBatchAsync_v2", code=719)
        fake.fail("cuMemcpyDtoHAsync_v2", code=2)
        fake.reset()
        fake.fail("cuStreamWaitEvent", code=2)
        with pytest.raises(stillframe.StillframeError, match="could not be copied off the device"):
            offloader.offload(group(1))
        assert same(offloader.offload(group(1)).tensors(), group(1))


def test_failed_device_is_reported_everywhere_and_the_pool_stays_readable(fake, engine):
    offloader = Offloader("cpu", engine=engine)
    ticket = offloader.offload(group(1))
    ticket.wait()
    fake.fail_copy(1, 700)
    with pytest.raises(stillframe.StillframeError, match=r"ILLEGAL_ADDRESS|could not be brought"):
        while True:  # until the core has noticed the failure
            offloader.release(offloader.onload(ticket))
    assert same(ticket.tensors(), group(1))
    offloader.close()


def test_offload_is_refused_during_a_graph_capture(fake, engine):
    with Offloader("cpu", engine=engine) as offloader:
        ticket = offloader.offload(group(1))
        ticket.wait()
        fake.capture(True)
        try:
            for call in (lambda: offloader.offload(group(2)), lambda: offloader.onload(ticket)):
                with pytest.raises(stillframe.StillframeError, match="graph is being captured"):
                    call()
        finally:
            fake.capture(False)
        assert same(offloader.onload(ticket), group(1))
