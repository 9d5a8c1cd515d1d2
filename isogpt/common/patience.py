"""Wait for an answer that may never come."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any


def within(limit_s: float, work: Callable, *arguments: object) -> Any:
    """
    Return what `work(*arguments)` returns or raises. It runs in a thread, which does not keep the process
    from exiting: a request to a store, a service or a disk may never return, not even after its own timeout.

    Raises:
        TimeoutError: there is no answer within limit_s.
    """
    answer = Future()

    def run() -> None:
        try:
            answer.set_result(work(*arguments))
        except BaseException as e:
            answer.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    if not wait([answer], limit_s).done:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return answer.result()
