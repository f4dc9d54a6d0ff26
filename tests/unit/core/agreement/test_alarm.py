"""The alarm of a channel's thread."""

import os
import resource
import threading
import time

from hvdtrain.core.process.alarm import NEVER, NOW, Alarm, after


def test_only_the_last_time_counts() -> None:
    alarm = Alarm()
    alarm.set(NOW)
    alarm.set(NEVER)
    alarm.set(after(3600.0))
    began = time.monotonic()
    alarm.set(after(0.02))
    alarm.wait()
    assert time.monotonic() - began >= 0.02


def test_an_alarm_before_the_wait_is_not_lost() -> None:
    alarm = Alarm()
    alarm.set(NOW)
    time.sleep(0.01)
    alarm.wait()


def test_a_closed_alarm_leaves_no_file_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    alarm = Alarm()
    alarm.close()
    alarm.set(NOW)
    # Meanwhile what others have left may be collected, with its files: there are no more than then.
    assert set(os.listdir("/proc/self/fd")) <= before


def test_without_files_each_time_is_at_once() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        alarm = Alarm()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    thread = threading.Thread(target=alarm.wait)
    thread.start()
    alarm.set(NEVER)
    alarm.set(after(3600.0))
    thread.join(60)
    assert not thread.is_alive()


def test_a_thread_that_waits_is_woken() -> None:
    alarm = Alarm()
    thread = threading.Thread(target=alarm.wait)
    thread.start()
    alarm.set(after(3600.0))
    alarm.set(NOW)
    thread.join(60)
    assert not thread.is_alive()
