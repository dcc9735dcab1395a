"""What a worker does when a run is profiled: it records its process, unless somebody else there does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollstock.dispatch import register

if TYPE_CHECKING:
    from rollstock.interfaces.device import Device
    from rollstock.profile.capture import Capture, Stretch


class ProfiledWorker:
    """A worker with a device, whose operators `rollstock train --profile` can look into."""

    device: Device[Any]
    _records = False

    @register(dispatch="all_gather")
    def start_profile(self) -> bool:
        """Begin to record; False where this process is recorded already, by the controller or another worker."""
        from rollstock.profile import capture  # only a profiled run needs torch's profiler

        self._records = capture.start(self.device.profiler_activities())
        return self._records

    @register(dispatch="all_gather")
    def stop_profile(self, stages: Sequence[Stretch], max_events: int) -> Capture | None:
        """End it; None from a worker that did not begin. See `rollstock.profile.capture.stop`."""
        from rollstock.profile import capture

        if not self._records:
            return None
        self._records = False
        self.device.synchronize()
        found = capture.stop(stages, max_events)
        if found is not None:
            found.peak_bytes = self.device.memory().peak
        return found
