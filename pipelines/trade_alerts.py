"""Complex event processing on trades: what looks wrong is told at once, to a topic that somebody acts on.

- `spike`: a price moves by 5 % within 10 seconds.
- `burst`: more than a million is turned over in an instrument within 10 seconds.
- `silence`: nobody trades an instrument for a minute.
- `wash`: an account buys and sells the same of an instrument within 30 seconds.

Reads `trades`; writes `trade-alerts` and, for trades that cannot be read, `trades-dead`. `act_on_alerts.py` acts.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as f
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from headrace.spark import pipeline
from messages import json_topic, once, to_topic, together, unusable, usable

WITHIN_S = 10
SPIKE = 0.05
BURST = 1_000_000.0
SILENCE_S = 60
WASH_WITHIN = "30 seconds"
WASH_TOLERANCE = 0.1
"""How much the quantities may differ."""
TELL_EVERY_S = 60
"""Spikes and bursts of an instrument are told once in such a time, not for each trade that is part of one."""
LATE_MAX = "1 minute"

TRADES = json_topic(
    "trades",
    "ts timestamp, trade_id string, instrument string, account string, side string, price double, quantity bigint",
)
NEEDED = "ts, trade_id, instrument, account, side, price, quantity"
STATE = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    )
}
"""`transformWithState` needs it."""


class Bar(NamedTuple):
    """The trades of one second."""

    low: float
    high: float
    turnover: float


class Found(NamedTuple):
    """Something that looks wrong: what, in which second, and how much."""

    kind: str
    second: int
    detail: str


class Tape:
    """The last seconds of an instrument: as many as may matter, however many trades there are in them.

    Trades may come in any order. They only ever raise a high, lower a low or add to a turnover, so what has been
    found stays true, and the order makes no difference to what is found in the end.
    """

    def __init__(self, bars: dict[int, Bar], told: set[str]) -> None:
        self.bars = bars
        self.told = told

    def add(self, second: int, price: float, turnover: float) -> None:
        """Take a trade in."""
        bar = self.bars.get(second, Bar(price, price, 0.0))
        self.bars[second] = Bar(min(bar.low, price), max(bar.high, price), bar.turnover + turnover)

    def found(self, changed: Iterable[int]) -> Iterator[Found]:
        """What is wrong in these seconds, or in those whose past they are, and has not been told."""
        touched = {second + later for second in changed for later in range(WITHIN_S)} & self.bars.keys()
        for second in sorted(touched):
            for found in self._wrong(second):
                mark = f"{found.kind}/{second // TELL_EVERY_S}"
                if mark not in self.told:
                    self.told.add(mark)
                    yield found

    def _wrong(self, second: int) -> Iterator[Found]:
        last = self.bars[second]
        window = [self.bars[at] for at in range(second - WITHIN_S + 1, second + 1) if at in self.bars]
        rise = last.high / min(bar.low for bar in window) - 1.0
        fall = 1.0 - last.low / max(bar.high for bar in window)
        turnover = sum(bar.turnover for bar in window)
        if max(rise, fall) >= SPIKE:
            yield Found("spike", second, f"{100 * (rise if rise > fall else -fall):+.1f} % within {WITHIN_S} s")
        if turnover >= BURST:
            yield Found("burst", second, f"{turnover:.0f} turned over within {WITHIN_S} s")

    def last_before_silence(self, changed: Iterable[int]) -> list[int]:
        """Of these seconds those behind which there is nothing yet for so long that it may be a silence."""
        return [second for second in changed if self.silent_after(second)]

    def silent_after(self, second: int) -> bool:
        """Whether nobody has traded for a while behind this second, as far as is known."""
        return not any(at in self.bars for at in range(second + 1, second + SILENCE_S + 1))

    def forget(self, before: int) -> None:
        """Drop the seconds before this one."""
        self.bars = {second: bar for second, bar in self.bars.items() if second >= before}
        self.told = {mark for mark in self.told if int(mark.split("/")[1]) * TELL_EVERY_S >= before - TELL_EVERY_S}


class TapeWatch(StatefulProcessor):
    """Keeps a tape for each instrument, and a timer for each silence that may be one."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Say what is kept: one value, so that a trigger reads and writes it once."""
        self._handle = handle
        self._state = handle.getValueState(
            "tape",
            "seconds array<bigint>, lows array<double>, highs array<double>, turnovers array<double>, "
            "told array<string>, settled bigint",
        )

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        """New trades of an instrument."""
        tape, settled = self._read()
        changed = set()
        for row in rows:
            tape.add(row.second, row.price, row.price * row.quantity)
            changed.add(row.second)
        for found in tape.found(changed):
            yield self._alert(key, found)
        for second in tape.last_before_silence(changed):
            self._handle.registerTimer((second + 1 + SILENCE_S) * 1000)
        # Timers up to the last watermark have gone off and need no tape; those up to this one come after the rows.
        tape.forget(settled - SILENCE_S - WITHIN_S)
        self._write(tape, timerValues.getCurrentWatermarkInMs() // 1000)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        """The time has come at which a silence is one, unless somebody has traded since."""
        del timerValues
        tape, _ = self._read()
        second = expiredTimerInfo.getExpiryTimeInMs() // 1000 - 1 - SILENCE_S
        if tape.silent_after(second):
            yield self._alert(key, Found("silence", second, f"no trade for {SILENCE_S} s"))
            if all(at <= second for at in tape.bars):
                self._state.clear()

    def _alert(self, key: Any, found: Found) -> Row:
        return Row(
            alert=f"{found.kind}/{key[0]}/{found.second}",
            kind=found.kind,
            instrument=key[0],
            second=found.second,
            detail=found.detail,
        )

    def _read(self) -> tuple[Tape, int]:
        kept = self._state.get()
        if kept is None:
            return Tape({}, set()), 0
        seconds, lows, highs, turnovers, told, settled = kept
        bars = {at: Bar(*bar) for at, *bar in zip(seconds, lows, highs, turnovers, strict=True)}
        return Tape(bars, set(told)), settled

    def _write(self, tape: Tape, settled: int) -> None:
        seconds = sorted(tape.bars)
        bars = [tape.bars[second] for second in seconds]
        self._state.update(
            (
                seconds,
                [bar.low for bar in bars],
                [bar.high for bar in bars],
                [bar.turnover for bar in bars],
                sorted(tape.told),
                settled,
            )
        )


def watched(trades: DataFrame) -> DataFrame:
    """Spikes, bursts and silences."""
    alerts = (
        once(trades, "trade_id", LATE_MAX)
        .withColumn("second", f.unix_seconds("ts"))
        .groupBy("instrument")
        .transformWithState(
            TapeWatch(),
            "alert string, kind string, instrument string, second bigint, detail string",
            outputMode="Append",
            timeMode="EventTime",
        )
    )
    nobody = f.lit(None).cast("string").alias("account")
    return alerts.select("alert", "kind", "instrument", nobody, f.timestamp_seconds("second").alias("ts"), "detail")


def washed(trades: DataFrame) -> DataFrame:
    """Pairs of trades with which an account has only traded with itself, as far as its position is concerned."""
    both = once(trades, "trade_id", LATE_MAX)
    buys, sells = (
        both.where(f.col("side") == side).select([f.col(name).alias(f"{side}_{name}") for name in trades.columns])
        for side in ("buy", "sell")
    )
    apart = f.expr(f"interval {WASH_WITHIN}")
    difference = f.abs(f.col("buy_quantity") - f.col("sell_quantity"))
    pairs = buys.join(
        sells,
        (f.col("buy_instrument") == f.col("sell_instrument"))
        & (f.col("buy_account") == f.col("sell_account"))
        & (f.col("sell_ts") >= f.col("buy_ts") - apart)
        & (f.col("sell_ts") <= f.col("buy_ts") + apart)
        & (difference <= WASH_TOLERANCE * f.greatest("buy_quantity", "sell_quantity")),
    )
    return pairs.select(
        f.concat_ws("/", f.lit("wash"), "buy_trade_id", "sell_trade_id").alias("alert"),
        f.lit("wash").alias("kind"),
        f.col("buy_instrument").alias("instrument"),
        f.col("buy_account").alias("account"),
        f.greatest("buy_ts", "sell_ts").alias("ts"),
        f.concat_ws(" ", "buy_quantity", f.lit("bought,"), "sell_quantity", f.lit("sold")).alias("detail"),
    )


@pipeline(source={"trades": TRADES}, sink={"format": "headrace"}, conf=STATE)
def trade_alerts(trades: DataFrame) -> DataFrame:
    """What is wrong with an instrument, and trades that cannot be read."""
    return together(
        to_topic(watched(usable(trades, NEEDED)), "trade-alerts", key="instrument"),
        unusable(trades, NEEDED, "trades-dead"),
    )


@pipeline(source={"trades": TRADES}, sink={"format": "headrace"}, conf=STATE)
def wash_trades(trades: DataFrame) -> DataFrame:
    """What is wrong with an account."""
    return to_topic(washed(usable(trades, NEEDED)), "trade-alerts", key="account")
