"""What torch's allocator gives out, as its profiler records it."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def most_allocated(call: Callable[[], object]) -> int:
    """The most bytes on the CPU at any time of a call, beyond those that there were before.

    It is called once before, so that what is made once is made.
    """
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
