"""The alarm of a channel's thread."""

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


def test_a_thread_that_waits_is_woken() -> None:
    alarm = Alarm()
    thread = threading.Thread(target=alarm.wait)
    thread.start()
    alarm.set(after(3600.0))
    alarm.set(NOW)
    thread.join(60)
    assert not thread.is_alive()
