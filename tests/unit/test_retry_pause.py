"""The pauses between attempts, and how often their failures are logged."""

from headrace.cluster.retry_pause import RetryPause


def test_pauses_grow_to_ten_seconds_and_begin_again_after_a_success() -> None:
    pause = RetryPause(lambda: 0.0)
    assert not pause.has_failed
    assert [pause.failed() for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert pause.has_failed
    pause.reset()
    assert pause.failed() == 0.5


def test_a_cause_is_news_once_and_then_every_minute() -> None:
    now_s = 100.0
    pause = RetryPause(lambda: now_s)
    assert pause.is_news("a")
    assert not pause.is_news("a")
    assert pause.is_news(ValueError("b"))
    now_s = 159.0
    assert not pause.is_news("b")
    now_s = 161.0
    assert pause.is_news("b")
