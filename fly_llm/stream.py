"""From the worker thread to whoever listens: a plain or an asynchronous iterator. Nobody waits while holding a lock.

Buffers are unbounded, so a stream nobody reads blocks nobody; dropping or closing a stream cancels its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType

from fly_llm.errors import FLyError
from fly_llm.types import Event, Result

Item = Event | BaseException | None
"""An event, the error that ended the request, or None after the last event."""


class Request:
    """One request's cancel flag, and where its items go."""

    def __init__(self, deliver: Callable[[Item], None]) -> None:
        self._deliver = deliver
        self._cancelled = False

    def cancelled(self) -> bool:
        """Whether nobody wants the rest; the engine asks before every forward."""
        return self._cancelled

    def cancel(self) -> None:
        """Stop the request before its next forward."""
        self._cancelled = True

    def deliver(self, item: Item) -> None:
        """Hand over an item; a listener that is gone cancels the request."""
        try:
            self._deliver(item)
        except RuntimeError:  # the listener's event loop has been closed
            self._cancelled = True


class EventStream(Iterator[Event]):
    """Iterates over the events of a request. Closing it, or leaving its `with` block, cancels what is left."""

    def __init__(self, start: Callable[[Request], None]) -> None:
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._items = items
        self._request = Request(items.put)
        self._ended = False
        start(self._request)

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        item = self._items.get()
        if isinstance(item, Event):
            return item
        self._ended = True
        self._items.put(None)  # for another thread that may be reading too
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Cancel the request; the engine stops before its next forward."""
        self._ended = True
        self._request.cancel()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        request = getattr(self, "_request", None)
        if request is not None:
            request.cancel()

    def result(self) -> Result:
        """Read to the end and return the finished answer.

        Raises:
            FLyError: the stream was closed, or its end has been read already.
        """
        with self:
            for event in self:
                if event.result is not None:
                    return event.result
        raise FLyError("this stream was closed before its end, or has been read to it: there is no result to return")


async def stream_async(start: Callable[[Request], None]) -> AsyncIterator[Event]:
    """The events of a request, without ever blocking the event loop; leaving the iteration cancels the request."""
    items: asyncio.Queue[Item] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    request = Request(lambda item: _ignore(loop.call_soon_threadsafe(items.put_nowait, item)))
    try:
        start(request)
        while (item := await items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        request.cancel()


async def result_async(start: Callable[[Request], None]) -> Result:
    """The finished answer of a request; cancelling the task cancels the request."""
    async with contextlib.aclosing(stream_async(start)) as events:  # type: ignore[type-var]
        async for event in events:
            if event.result is not None:
                return event.result
    raise FLyError("the request ended without a result")


def _ignore(_: object) -> None: ...
